"""Tokenizers: train one on the corpus, cache it, or load one; the only place that knows special ids.

Whichever it is, it has T5's special tokens: pad, eos and 100 sentinels <extra_id_k>. What it lacks of them is added
behind its own ids, as in T5 with <extra_id_0> last. Bulk encoding with a SentencePiece model goes through SentencePiece
itself, about ten times faster than Transformers; an export gets the same model as a tokenizer of Transformers.
"""

import functools
import hashlib
import io
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nanoT5 import UserError
from nanoT5.sources import write_whole

SENTINELS = 100  # T5's number of <extra_id_k>
NAMES = [f"<extra_id_{k}>" for k in range(SENTINELS)]
# in the order of their ids; the space before one belongs to what it stands for
TOKENS = [tokenizers.AddedToken(name, lstrip=True, normalized=False, special=True) for name in reversed(NAMES)]
TRAINING_CHARACTERS = 64_000_000  # of text read at most; SentencePiece samples its sentences from these
SENTENCE_CHARACTERS = 1_000  # lines are cut to this length, since SentencePiece leaves out sentences above 4,192 bytes
TRAINING_SENTENCES = 25_000  # sampled; 6 s on two cores, and 50,000 give the same number of tokens to within 0.1 %
PROBE = " Tokenizers that\n\tagree ON this  are the same, “naïve” e\u0301 \uff21 0123 🙂 "


@dataclass(frozen=True)
class Tokenizer:
    """What pretraining needs of a tokenizer, whichever library it comes from."""

    encode: Callable[[list[str]], list[np.ndarray]]  # texts to int32 ids, without pad, eos and sentinels
    decode: Callable[[list[int]], str]
    save: Callable[[Path], None]  # writes a folder that transformers.AutoTokenizer loads
    pad_id: int
    eos_id: int
    sentinel_ids: np.ndarray  # int64 (SENTINELS,): the ids of <extra_id_0>, <extra_id_1>, ...
    size: int  # rows that an embedding needs: the highest id and one
    sha256: str
    description: str


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def load(name: str) -> Tokenizer:
    """The tokenizer called `name`: a SentencePiece .model file, a tokenizer folder, or a Hub name."""
    path = Path(name).expanduser()
    if path.is_file():
        return from_sentencepiece(path.read_bytes(), str(path))
    tokenizer = from_transformers(str(path) if path.exists() else name)
    if (path / "spiece.model").is_file():
        quick = from_sentencepiece((path / "spiece.model").read_bytes(), str(path))
        # a folder can have more to it than its SentencePiece model: lower-casing, tokens that were added
        if quick.size == tokenizer.size and np.array_equal(quick.encode([PROBE]), tokenizer.encode([PROBE])):
            return quick
    return tokenizer


def from_sentencepiece(model: bytes, description: str) -> Tokenizer:
    """A SentencePiece model of any kind but whole words, with whichever special ids."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise UserError(
            f"data.tokenizer: {description} is not a SentencePiece model; of another tokenizer, name the folder"
        ) from None
    pieces = [processor.id_to_piece(id) for id in range(processor.get_piece_size())]
    unk = pieces[processor.unk_id()] if processor.unk_id() >= 0 else None
    pad, eos = (
        pieces[id] if id >= 0 else name for id, name in ((processor.pad_id(), "<pad>"), (processor.eos_id(), "</s>"))
    )
    export = as_exported(converted(model, processor.unk_id(), description), unk, pad, eos)

    def save(folder: Path) -> None:
        export.save_pretrained(folder)
        (folder / "spiece.model").write_bytes(model)  # for load()

    encode = functools.partial(processor.encode, out_type="numpy", num_threads=1)
    return finished(export, encode, save, pieces, hashlib.sha256(model).hexdigest(), description)


def from_transformers(name: str) -> Tokenizer:
    """A tokenizer folder saved by Transformers, or one of the Hub."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        tokenizer(PROBE)  # some want more than text, as the boxes of a layout
    except Exception as error:  # whatever a damaged file makes of it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"data.tokenizer={name} is neither a SentencePiece .model file nor a tokenizer folder or Hub name that "
            f"Transformers can load ({reason})"
        ) from None
    before = tokenizer.get_vocab()
    eos = tokenizer.eos_token or tokenizer.sep_token or "</s>"  # BERT's sep closes a text too
    pad = tokenizer.pad_token if tokenizer.pad_token not in (None, eos, tokenizer.unk_token) else "<pad>"
    if tokenizer.is_fast:
        tokenizer = as_exported(tokenizer.backend_tokenizer, tokenizer.unk_token, pad, eos)
    else:
        tokenizer.add_special_tokens({"pad_token": pad, "eos_token": eos})
        tokenizer.add_tokens([token for token in TOKENS if token.content not in before], special_tokens=True)
    tokenizer.model_max_length = int(1e30)  # documents are longer than a model's inputs: chunks are cut later
    encode = functools.partial(encode_with, tokenizer)
    content = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    return finished(tokenizer, encode, tokenizer.save_pretrained, before, sha256, name)


def as_exported(backend: tokenizers.Tokenizer, unk: str | None, pad: str, eos: str) -> PreTrainedTokenizerFast:
    """A tokenizer of Transformers that has the special tokens, and closes a text by eos alone, as in pretraining.

    Of the general class, which reloads to just this; others, such as GPT2Tokenizer, build parts of themselves anew.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=unk,
        pad_token=pad,
        eos_token=eos,
        extra_special_tokens=TOKENS,
        model_input_names=["input_ids", "attention_mask"],  # token types are nothing that T5 takes
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", eos], pair=["$A", eos, "$B", eos], special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    return tokenizer


def finished(
    export: PreTrainedTokenizerBase,
    encode: Callable,
    save: Callable,
    before: Iterable[str],  # the tokens that it had by itself
    sha256: str,
    description: str,
) -> Tokenizer:
    before, sentinels = set(before), export.convert_tokens_to_ids(NAMES)
    size = max(export.get_vocab().values()) + 1  # more than len(export) where some ids have no token
    special = np.zeros(size, dtype=bool)
    special[[export.pad_token_id, export.eos_token_id, *sentinels]] = True
    added = [token for token in (export.pad_token, export.eos_token) if token not in before]
    if new := len(set(NAMES) - before):
        added.append(f"{new} sentinels")
    return checked(
        Tokenizer(
            encode=functools.partial(without, special, encode),
            decode=export.decode,
            save=save,
            pad_id=export.pad_token_id,
            eos_id=export.eos_token_id,
            sentinel_ids=np.array(sentinels),
            size=size,
            sha256=sha256,
            description=f"{description}, {' + '.join([f'{len(before):,} ids', *added])}",
        )
    )


# Functions of the module, so that they can be sent to worker processes


def without(special: np.ndarray, encode: Callable, texts: list[str]) -> list[np.ndarray]:
    """Encode, leaving out special tokens that a text spells out, as "</s>" in a web page; special: bool (size,)."""
    return [ids[~special[ids]] if special[ids].any() else ids for ids in encode(texts)]


def encode_with(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    found = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False).input_ids
    return [np.array(ids, dtype=np.int32) for ids in found]


def checked(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer itself, if its special ids are fit for span corruption: the one check of them."""
    ids = [tokenizer.pad_id, tokenizer.eos_id, *tokenizer.sentinel_ids.tolist()]
    if min(ids) < 0 or max(ids) >= tokenizer.size or len(set(ids)) != len(ids):
        raise UserError(f"data.tokenizer: pad, eos and 100 sentinels need ids of their own in {tokenizer.description}")
    for k, id in enumerate(tokenizer.sentinel_ids.tolist()):
        if (text := tokenizer.decode([id]).strip()) != f"<extra_id_{k}>":
            raise UserError(f"data.tokenizer: id {id} of {tokenizer.description} is {text!r}, not <extra_id_{k}>")
    return tokenizer


def converted(model: bytes, unk_id: int, description: str) -> tokenizers.Tokenizer:
    """A SentencePiece model for the library that Transformers builds on, which gives every text the same ids."""
    proto = ModelProto.FromString(model)
    trainer, normalizer, kind = proto.trainer_spec, proto.normalizer_spec, ModelProto.SentencePiece
    if trainer.model_type == TrainerSpec.WORD:
        raise UserError(f"data.tokenizer: {description} has whole words only: train one of type unigram, bpe or char")
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == kind.NORMAL}
    whole = [piece.piece for piece in proto.pieces if piece.type == kind.USER_DEFINED]  # wherever a text has them
    if trainer.model_type == TrainerSpec.UNIGRAM:
        scores |= dict.fromkeys(whole, 0.0)
        never = min(scores.values()) - 1000  # of the others, so that no text gets a byte or </s> by spelling it
        scored = [(piece.piece, scores.get(piece.piece, never)) for piece in proto.pieces]
        core: models.Model = models.Unigram(scored, unk_id, trainer.byte_fallback)
    else:
        # SentencePiece joins the two neighbours that make the piece with the best score
        pairs = [(-score, piece[:i], piece[i:]) for piece, score in scores.items() for i in range(1, len(piece))]
        merges = [(left, right) for _, left, right in sorted(pairs) if left in scores and right in scores]
        vocabulary = {piece.piece: id for id, piece in enumerate(proto.pieces)}
        core = models.BPE(
            vocabulary,
            merges,
            unk_token=proto.pieces[unk_id].piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
            ignore_merges=bool(whole),
        )
    steps: list[normalizers.Normalizer] = []
    if normalizer.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        steps.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z| +(?= )"), ""))
    if normalizer.add_dummy_prefix:
        edge = r"(?m)(?<=.)\z" if trainer.treat_whitespace_as_suffix else r"(?m)\A(?=.)"  # not of an empty text
        steps.append(normalizers.Replace(tokenizers.Regex(edge), " "))
    if normalizer.escape_whitespaces:
        steps.append(normalizers.Replace(" ", "▁"))
    tokenizer = tokenizers.Tokenizer(core)
    tokenizer.normalizer = normalizers.Sequence(steps)
    if whole:
        longest_first = "|".join(map(re.escape, sorted(whole, key=len, reverse=True)))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(longest_first), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Training


def train(texts: Iterable[str], vocab_size: int, cache: Path) -> Tokenizer:
    """A SentencePiece unigram model of vocab_size pieces, trained on texts once and cached by their content.

    Deterministic: the sentences are sampled here, since SentencePiece samples others in every process.
    """
    sentences = cut(texts, TRAINING_CHARACTERS)
    if len(sentences) > TRAINING_SENTENCES:
        sentences = random.Random(0).sample(sentences, TRAINING_SENTENCES)
    digest = hashlib.sha256(f"{sentencepiece.__version__} {vocab_size}\n".encode())
    for sentence in sentences:
        digest.update(sentence.encode() + b"\n")
    path = cache / f"tokenizer-{digest.hexdigest()[:16]}.model"
    if not path.is_file():
        write_whole(path, fit(sentences, vocab_size))
    return from_sentencepiece(path.read_bytes(), "unigram")


def cut(texts: Iterable[str], characters: float = float("inf")) -> list[str]:
    """The lines of texts, cut to lengths that SentencePiece takes, until there are more than so many characters."""
    sentences, so_far = [], 0
    for text in texts:
        for line in text.splitlines():
            sentences += [line[i : i + SENTENCE_CHARACTERS] for i in range(0, len(line), SENTENCE_CHARACTERS)]
            so_far += len(line)
        if so_far > characters:
            break
    if not any(sentence.strip() for sentence in sentences):
        raise UserError("the corpus has no text to train a tokenizer on: check data.path")
    return sentences


def fit(sentences: list[str], vocab_size: int, **options) -> bytes:
    """A SentencePiece unigram model with T5's special ids: pad 0, eos 1, unk 2, then the other pieces.

    options: more of SentencePiece's own. Raises UserError for a vocab_size that the sentences do not allow.
    """
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
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        # SentencePiece's last sentence says how many pieces the text allows
        reason = str(error).strip().splitlines()[-1].split("] ")[-1]
        raise UserError(f"data.vocab_size={vocab_size} does not suit this corpus: {reason}") from None
    return model.getvalue()
