"""Tokenizers: train one on the corpus, cache it, or load one; the only place that knows special ids.

Bulk encoding goes through SentencePiece itself, about ten times faster than the Transformers tokenizer that an exported
model gets. Special ids are T5's: pad 0, eos 1, unk 2, the pieces, then 100 sentinels of which <extra_id_0> is the last.
"""

import functools
import hashlib
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece

from nanoT5 import UserError
from nanoT5.sources import write_whole

SENTINELS = 100  # T5's number of <extra_id_k>
TRAINING_CHARACTERS = 64_000_000  # of text read at most; SentencePiece samples its sentences from these
SENTENCE_CHARACTERS = 1_000  # lines are cut to this length, since SentencePiece leaves out sentences above 4,192 bytes
TRAINING_SENTENCES = 25_000  # sampled; 6 s on two cores, and 50,000 give the same number of tokens to within 0.1 %


@dataclass(frozen=True)
class Tokenizer:
    """What pretraining needs of a tokenizer, whichever library it comes from."""

    encode: Callable[[list[str]], list[list[int]]]  # texts to ids, without eos
    decode: Callable[[list[int]], str]
    save: Callable[[Path], None]  # writes a folder that transformers.AutoTokenizer loads
    pad_id: int
    eos_id: int
    sentinel_ids: np.ndarray  # int64 (SENTINELS,): the ids of <extra_id_0>, <extra_id_1>, ...
    size: int  # number of ids
    sha256: str
    description: str


def from_sentencepiece(model: bytes, description: str) -> Tokenizer:
    """A SentencePiece model, with 100 sentinels added behind its pieces as Transformers' T5 tokenizer adds them."""
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError:
        raise UserError(f"data.tokenizer: {description} is not a SentencePiece model") from None
    pieces = processor.get_piece_size()
    for name, id in {"<pad>": processor.pad_id(), "</s>": processor.eos_id(), "<unk>": processor.unk_id()}.items():
        if id < 0 or processor.id_to_piece(id) != name:
            raise UserError(
                f"data.tokenizer: {description} has no {name}: train it as T5's is, with pad_id=0, pad_piece=<pad>, "
                f"eos_id=1, unk_id=2, bos_id=-1"
            )

    def save(folder: Path) -> None:
        from transformers import T5Tokenizer

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spiece.model").write_bytes(model)  # Transformers 5 reads the model only under this name in a folder
        T5Tokenizer.from_pretrained(folder).save_pretrained(folder)

    def decode(ids: list[int]) -> str:
        return (
            "".join(
                f"<extra_id_{pieces + SENTINELS - 1 - i}>" if i >= pieces else processor.id_to_piece(i) for i in ids
            )
            .replace("▁", " ")
            .lstrip()
        )

    return Tokenizer(
        encode=processor.encode,
        decode=decode,
        save=save,
        pad_id=processor.pad_id(),
        eos_id=processor.eos_id(),
        sentinel_ids=pieces + SENTINELS - 1 - np.arange(SENTINELS),
        size=pieces + SENTINELS,
        sha256=hashlib.sha256(model).hexdigest(),
        description=f"{description}, {pieces:,} pieces + {SENTINELS} sentinels",
    )


def from_transformers(name: str) -> Tokenizer:
    """A tokenizer folder saved by Transformers, or one of the Hub."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever a damaged file makes of it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"data.tokenizer={name} is neither a SentencePiece .model file nor a tokenizer folder or Hub name that "
            f"Transformers can load ({reason})"
        ) from None
    tokenizer.model_max_length = int(1e30)  # documents are longer than a model's inputs: chunks are cut later
    vocabulary = tokenizer.get_vocab()
    special = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}
    sentinels = [vocabulary.get(f"<extra_id_{k}>") for k in range(SENTINELS)]
    missing = [kind for kind, id in special.items() if id is None]
    missing += [f"<extra_id_{k}>" for k, id in enumerate(sentinels) if id is None]
    if missing:
        raise UserError(
            f"data.tokenizer={name} has no {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}: "
            f"give a T5 tokenizer, or a SentencePiece .model file, to which sentinels are added"
        )
    return Tokenizer(
        encode=functools.partial(encode_with, tokenizer, frozenset([*special.values(), *sentinels])),
        decode=tokenizer.decode,
        save=tokenizer.save_pretrained,
        pad_id=special["pad"],
        eos_id=special["eos"],
        sentinel_ids=np.array(sentinels),
        size=len(tokenizer),
        sha256=hashlib.sha256(repr(sorted(vocabulary.items())).encode()).hexdigest(),
        description=f"{name}, {len(tokenizer):,} ids",
    )


def encode_with(tokenizer, special: frozenset[int], texts: list[str]) -> list[list[int]]:
    """Encode with a Transformers tokenizer, leaving out special tokens that a text spells out, as "</s>" in a web page.

    A function of the module, so that it can be sent to worker processes.
    """
    encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [[id for id in ids if id not in special] for ids in encoded]


def load(name: str) -> Tokenizer:
    """The tokenizer called `name`: a SentencePiece .model file, a folder (its spiece.model if there), or a Hub name."""
    path = Path(name).expanduser()
    if path.is_dir() and (path / "spiece.model").is_file():
        path = path / "spiece.model"
    if path.is_file():
        return checked(from_sentencepiece(path.read_bytes(), str(path)))
    return checked(from_transformers(str(path) if path.exists() else name))


def train(texts: Iterable[str], vocab_size: int, cache: Path) -> Tokenizer:
    """A SentencePiece unigram model of vocab_size pieces, trained on texts once and cached by their content.

    Deterministic: SentencePiece samples its sentences with a fixed seed.
    """
    sentences, characters = [], 0
    digest = hashlib.sha256(f"{sentencepiece.__version__} {vocab_size} {TRAINING_SENTENCES}\n".encode())
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), SENTENCE_CHARACTERS):
                sentences.append(line[start : start + SENTENCE_CHARACTERS])
                digest.update(sentences[-1].encode() + b"\n")
            characters += len(line)
        if characters > TRAINING_CHARACTERS:
            break
    if not any(sentence.strip() for sentence in sentences):
        raise UserError("the corpus has no text to train a tokenizer on: check data.path")
    path = cache / f"tokenizer-{digest.hexdigest()[:16]}.model"
    if not path.is_file():
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                vocab_size=vocab_size,
                pad_id=0,
                eos_id=1,
                unk_id=2,
                bos_id=-1,
                pad_piece="<pad>",
                input_sentence_size=TRAINING_SENTENCES,
                shuffle_input_sentence=True,
                minloglevel=2,
            )
        except RuntimeError as error:
            # SentencePiece's last sentence says how many pieces the text allows
            reason = str(error).strip().splitlines()[-1].split("] ")[-1]
            raise UserError(f"data.vocab_size={vocab_size} does not suit this corpus: {reason}") from None
        write_whole(path, model.getvalue())
    return checked(from_sentencepiece(path.read_bytes(), "unigram"))


def checked(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer itself, if its special ids are fit for span corruption: the one check of them."""
    ids = [tokenizer.pad_id, tokenizer.eos_id, *tokenizer.sentinel_ids.tolist()]
    if min(ids) < 0 or max(ids) >= tokenizer.size or len(set(ids)) != len(ids):
        raise UserError(f"data.tokenizer: pad, eos and 100 sentinels need ids of their own in {tokenizer.description}")
    for k, id in enumerate(tokenizer.sentinel_ids.tolist()):
        if (text := tokenizer.decode([id]).strip()) != f"<extra_id_{k}>":
            raise UserError(f"data.tokenizer: id {id} of {tokenizer.description} is {text!r}, not <extra_id_{k}>")
    return tokenizer
