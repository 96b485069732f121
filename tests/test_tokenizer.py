import io
import json
import os
import pickle
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import hub
import numpy as np
import pytest
import sentencepiece
import tokenizers
import train_tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertTokenizer,
    ByT5Tokenizer,
    GPT2Tokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5Tokenizer,
)

from nanoT5 import UserError, config, main, sources, tokenizer

ROOT = Path(main.__file__).parent.parent

ODD_TEXTS = [
    *("", " ", "  two  spaces ", "tab\tand\nnew line\n", "“quoted”, naïve, e\u0301, ＦＵＬＬ ﬁ", "日本語 🙂🙂 x"),
    *(
        "<br>a<br> b http://x",
        "......... --------- aaaaaaa",
        "▁literal ▁",
        "<0x0A>",
        "one</s>two <pad>",
        "<extra_id_7>",
    ),
]


def sentencepiece_model(documents: list[str], **options) -> bytes:
    model = io.BytesIO()
    options = {"vocab_size": 600, "minloglevel": 2} | options
    lines = iter("\n".join(documents).splitlines())
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options)
    return model.getvalue()


BYTES = {"byte_fallback": True, "vocab_size": 900}
SENTENCEPIECE = {  # options of the trainer, and what is added
    "as T5": ({"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "pad_piece": "<pad>"}, "100 sentinels"),
    "defaults, with a bos": ({}, "<pad> + 100 sentinels"),
    "without eos": ({"bos_id": -1, "eos_id": -1}, "<pad> + </s> + 100 sentinels"),
    "other names": (
        {"pad_id": 3, "eos_id": 0, "unk_id": 1, "bos_id": 2, "eos_piece": "[END]", "unk_piece": "[UNK]"},
        "100 sentinels",
    ),
    "bytes": (BYTES, "<pad> + 100 sentinels"),
    "BPE": ({"model_type": "bpe"}, "<pad> + 100 sentinels"),
    "BPE as Llama's": (
        {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False} | BYTES,
        "<pad> + 100 sentinels",
    ),
    "characters": ({"model_type": "char", "vocab_size": 80}, "<pad> + 100 sentinels"),
    "lower case": ({"normalization_rule_name": "nmt_nfkc_cf"}, "<pad> + 100 sentinels"),
    "suffixes": ({"treat_whitespace_as_suffix": True}, "<pad> + 100 sentinels"),
    "some sentinels": ({"user_defined_symbols": ["<extra_id_0>", "<br>", "http"]}, "<pad> + 99 sentinels"),
    "BPE with symbols": ({"model_type": "bpe", "user_defined_symbols": ["<br>", "http"]}, "<pad> + 100 sentinels"),
    "all sentinels": ({"control_symbols": tokenizer.NAMES}, "<pad>"),
}


def byte_level(documents) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    return backend


def gpt2(documents) -> GPT2Tokenizer:
    model = json.loads(byte_level(documents).to_str())["model"]
    return GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])


def gpt2_with_words(documents) -> GPT2Tokenizer:
    words = gpt2(documents)
    words.add_tokens(["http", "<br>"])
    return words


def pad_is_eos(documents) -> PreTrainedTokenizerFast:
    backend = byte_level(documents)
    backend.enable_truncation(5)
    backend.enable_padding(length=8)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def bert(documents) -> BertTokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    backend.train_from_iterator(documents, trainer)
    return BertTokenizer(vocab=backend.get_vocab())


def t5_with_words(documents) -> T5Tokenizer:
    model = sentencepiece.SentencePieceProcessor(
        model_proto=sentencepiece_model(documents, **SENTENCEPIECE["as T5"][0])
    )
    words = T5Tokenizer(vocab=[(model.id_to_piece(i), model.get_score(i)) for i in range(600)])
    words.add_tokens(["http", "<br>"])
    return words


TRANSFORMERS = {  # what builds it, its eos, and the end of the description
    "GPT-2": (gpt2, "<|endoftext|>", "700 ids + <pad> + 100 sentinels"),
    "GPT-2 with words": (gpt2_with_words, "<|endoftext|>", "702 ids + <pad> + 100 sentinels"),
    "pad is eos": (pad_is_eos, "<|endoftext|>", "700 ids + <pad> + 100 sentinels"),
    "BERT": (bert, "[SEP]", "700 ids + 100 sentinels"),
    "T5 with words": (t5_with_words, "</s>", "702 ids"),
    "ByT5": (lambda _: ByT5Tokenizer(), "</s>", "384 ids"),
    "ByT5 without sentinels": (lambda _: ByT5Tokenizer(extra_ids=0), "</s>", "259 ids + 100 sentinels"),
}


def encoded_by(given: tokenizer.Tokenizer, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in given.encode(texts)]


def check_export(given: tokenizer.Tokenizer, texts: list[str], folder: Path) -> None:
    """Everything that is asked of a tokenizer of any kind, and of what it leaves beside a model."""
    special = {given.pad_id, given.eos_id, *given.sentinel_ids.tolist()}
    assert len(special) == 102 and max(special) < given.size
    encoded = encoded_by(given, texts)
    assert not special & {id for ids in encoded for id in ids}
    assert [ids.tolist() for ids in pickle.loads(pickle.dumps(given.encode))(texts)] == encoded
    (ids,) = given.encode(["the name of a file, in the order of the arguments"])
    assert given.decode(ids).strip() == "the name of a file, in the order of the arguments"
    given.save(folder)
    T5Config(vocab_size=given.size).save_pretrained(folder)
    exported = AutoTokenizer.from_pretrained(folder)
    plain = [i for i, text in enumerate(texts) if not re.search("<pad>|</s>|<extra_id", text)]
    again = exported([texts[i] for i in plain], add_special_tokens=False)["input_ids"]
    assert again == [encoded[i] for i in plain]
    before, between = given.encode(["Return the", " of it."])
    first, last = given.sentinel_ids[[0, 99]].tolist()
    closed = exported("Return the<extra_id_0> of it.<extra_id_99>")
    assert closed["input_ids"] == [*before, first, *between, last, given.eos_id]
    assert set(closed) == {"input_ids", "attention_mask"}
    assert len(exported) == given.size and exported.pad_token_id == given.pad_id
    loaded = tokenizer.load(str(folder))
    assert encoded_by(loaded, texts) == encoded and loaded.sha256 == given.sha256


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_any_sentencepiece_model(kind, documents, tmp_path):
    options, added = SENTENCEPIECE[kind]
    model = sentencepiece_model(documents, **options)
    (tmp_path / "x.model").write_bytes(model)
    given = tokenizer.load(str(tmp_path / "x.model"))
    assert given.description.endswith(f" ids + {added}")
    check_export(given, documents[:20] + ODD_TEXTS, tmp_path / "export")
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert encoded_by(given, documents) == processor.encode(documents)


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_any_tokenizer_of_transformers(kind, documents, tmp_path):
    build, eos, description = TRANSFORMERS[kind]
    original = build(documents)
    original.save_pretrained(tmp_path / "given")
    given = tokenizer.load(str(tmp_path / "given"))
    assert given.description.endswith(f"given, {description}") and given.decode([given.eos_id]) == eos
    check_export(given, documents[:20] + ODD_TEXTS, tmp_path / "export")
    assert encoded_by(given, documents) == original(documents, add_special_tokens=False)["input_ids"]


def test_sentinels_are_encoded_as_by_t5(trained, tmp_path):
    trained.save(tmp_path / "export")
    (tmp_path / "t5").mkdir()
    (tmp_path / "export" / "spiece.model").rename(tmp_path / "t5" / "spiece.model")
    texts = ["Return the <extra_id_0> of <extra_id_99>, if any.", "<extra_id_1> a  b<extra_id_2>c"]
    exported, t5 = AutoTokenizer.from_pretrained(tmp_path / "export"), T5Tokenizer.from_pretrained(tmp_path / "t5")
    assert exported(texts)["input_ids"] == t5(texts)["input_ids"]


def test_a_folder_with_more_than_its_sentencepiece_model(trained, tmp_path):
    trained.save(tmp_path)
    assert tokenizer.load(str(tmp_path)).sha256 == trained.sha256
    more = AutoTokenizer.from_pretrained(tmp_path)
    more.add_tokens(["frobnicate"])
    more.save_pretrained(tmp_path)
    assert tokenizer.load(str(tmp_path)).size == trained.size + 1


@pytest.mark.parametrize("kind", ["GPT-2", "ByT5"])
def test_a_run_with_a_tokenizer_of_transformers(kind, documents, tiny, tmp_path):
    TRANSFORMERS[kind][0](documents).save_pretrained(tmp_path / "given")
    options = [f"data.tokenizer={tmp_path / 'given'}", "data.num_workers=2", f"hydra.run.dir={tmp_path / 'run'}"]
    summary = main.run([*tiny, *options])
    assert summary["tokenizer"]["description"].endswith(TRANSFORMERS[kind][2])
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model")
    exported = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert model.get_input_embeddings().num_embeddings >= len(exported)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (exported.pad_token_id, exported.eos_token_id)
    model.generate(**exported("Return the <extra_id_0>.", return_tensors="pt"), max_new_tokens=2)


def test_a_name_on_the_hub(documents, tmp_path):
    """In the shape of google/t5-v1_1-base: a SentencePiece model and the class that it is for."""
    folder = tmp_path / "hub" / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "spiece.model").write_bytes(sentencepiece_model(documents, **SENTENCEPIECE["as T5"][0]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 100}))
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 768}))
    code = "import sys; from nanoT5 import tokenizer; print(tokenizer.load(sys.argv[1]).description)"
    with hub.serving(tmp_path / "hub") as (address, _):
        env = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        there, missing = (
            subprocess.run([sys.executable, "-c", code, name], cwd=ROOT, env=env, capture_output=True, text=True)
            for name in ("owner/name", "owner/nothing")
        )
    assert there.stdout == "owner/name, 700 ids\n", there.stderr
    assert "UserError: data.tokenizer=owner/nothing is neither" in missing.stderr


@pytest.fixture(scope="module")
def trained(documents, cache):
    return tokenizer.train(documents, 512, cache)


def test_ids_are_t5s(trained):
    assert (trained.pad_id, trained.eos_id, trained.size) == (0, 1, 612)
    assert trained.sentinel_ids.tolist() == list(range(611, 511, -1))
    assert trained.decode([611, 512]) == "<extra_id_0><extra_id_99>"


def test_training_is_deterministic_and_cached_by_content(trained, documents, cache, tmp_path, monkeypatch):
    assert tokenizer.train(documents, 512, tmp_path).sha256 == trained.sha256
    assert tokenizer.train(documents[:-1], 512, tmp_path).sha256 != trained.sha256
    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", None)  # would fail
    assert tokenizer.train(documents, 512, cache).sha256 == trained.sha256


def test_exported_tokenizer_agrees(trained, documents, tmp_path):
    trained.save(tmp_path / "model")
    exported = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert exported(documents, add_special_tokens=False)["input_ids"] == encoded_by(trained, documents)
    assert len(exported) == trained.size
    assert exported.convert_tokens_to_ids([f"<extra_id_{k}>" for k in range(100)]) == trained.sentinel_ids.tolist()


def test_a_saved_folder_can_be_given(trained, documents, tmp_path):
    trained.save(tmp_path / "both")
    AutoTokenizer.from_pretrained(tmp_path / "both").save_pretrained(tmp_path / "json only")
    (tmp_path / "t5.model").write_bytes((tmp_path / "both" / "spiece.model").read_bytes())
    for name in ("both", "json only", "t5.model"):
        loaded = tokenizer.load(str(tmp_path / name))
        assert encoded_by(loaded, documents[:5]) == encoded_by(trained, documents[:5]), name
        assert (loaded.pad_id, loaded.eos_id, loaded.size) == (0, 1, 612)
        assert (loaded.sentinel_ids == trained.sentinel_ids).all()
        loaded.save(tmp_path / f"{name} again")
        assert len(AutoTokenizer.from_pretrained(tmp_path / f"{name} again")) == 612


def test_special_tokens_in_a_text_are_text(trained, tmp_path):
    trained.save(tmp_path)
    (tmp_path / "spiece.model").unlink()
    loaded = tokenizer.load(str(tmp_path))
    ids = loaded.encode(["one </s> two <extra_id_5> <pad>"])[0]
    assert not set(ids) & {0, 1, *trained.sentinel_ids.tolist()}


def test_long_lines_are_not_lost(documents, tmp_path):
    """SentencePiece leaves out sentences of more than 4,192 bytes."""
    long = [" ".join(documents).replace("\n", " ")]
    assert len(long[0]) > 100_000
    assert tokenizer.train(long, 512, tmp_path).size == 612
    with pytest.raises(UserError, match="no text"):
        tokenizer.train([" ", "\n"], 512, tmp_path)


def test_whole_words_are_refused(documents):
    with pytest.raises(UserError, match="x has whole words only: train one of type unigram"):
        tokenizer.from_sentencepiece(sentencepiece_model(documents, model_type="word"), "x")


def test_what_is_no_tokenizer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "x.model").write_text("text")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    faults = {"x.model": "not a SentencePiece model", "nowhere": "neither", "broken": "Transformers can load"}
    for name, words in faults.items():
        with pytest.raises(UserError, match=words):
            tokenizer.load(str(tmp_path / name))


def test_shared_ids_are_refused(trained):
    for change in ({"eos_id": 0}, {"pad_id": -1}, {"sentinel_ids": np.roll(trained.sentinel_ids, 1)}, {"size": 600}):
        with pytest.raises(UserError, match="data.tokenizer"):
            tokenizer.checked(tokenizer.Tokenizer(**(vars(trained) | change)))


def test_a_vocabulary_larger_than_the_text_allows_is_refused(documents, tmp_path):
    with pytest.raises(UserError, match="data.vocab_size=90000.*<="):
        tokenizer.train(documents, 90_000, tmp_path)
    with pytest.raises(UserError, match="data.vocab_size=20.*"):
        tokenizer.train(documents, 20, tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# scripts/train_tokenizer.py


def script(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "scripts/train_tokenizer.py", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def files(documents, tmp_path_factory) -> Path:
    """A folder of 20 files of some 35,000 characters; a document begins with the numbers of its file and its row."""
    folder = tmp_path_factory.mktemp("files")
    lines = [line for text in documents for line in text.splitlines()]
    for i in range(20):
        rows = [f"{i} {row} {line}" for row, line in enumerate(lines[i::20])]
        (folder / f"{i}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return folder


def sampled(files: Path, characters: int, *overrides: str) -> dict[int, list[int]]:
    """The rows that are in a sample, by file."""
    cfg, _ = config.load(["data=text", f"data.path={files}", *overrides])
    corpus = replace(sources.text(cfg.data, None), equal_files=1000.0)  # of which streams would share out whole files
    texts = [document.text for document in train_tokenizer.sample(corpus, cfg, characters)]
    assert min(characters, 200_000) <= sum(map(len, texts)) <= characters + 20
    rows = defaultdict(list)
    for words in map(str.split, texts):
        if len(words) > 2:  # else it was cut off within the numbers
            rows[int(words[0])].append(int(words[1]))
    return rows


def test_a_sample_is_from_everywhere(files, monkeypatch):
    everything, some = sampled(files, 10**9), sampled(files, 100_000)
    assert len(everything) == len(some) == 20
    for file, rows in some.items():
        assert set(rows) < set(everything[file])  # so that nothing held out is in it
        assert max(rows) > 0.7 * max(everything[file])  # not the beginning of the file alone
    assert sampled(files, 100_000) == some
    assert all(len(set(rows)) == len(rows) for rows in everything.values())
    # of many files some are read, which are the seed's choice, and no more than ten times what is wanted
    monkeypatch.setattr(train_tokenizer, "FILES", 5)
    few = sampled(files, 1_000)
    assert len(few) == 5 and max(map(max, few.values())) < 60
    assert few.keys() != sampled(files, 1_000, "seed=1").keys()


def test_the_same_command_gives_the_same_model(files, tmp_path):
    options = ["data=text", f"data.path={files}", "--vocab-size=300", "--characters=40000"]
    for name in ("a", "b"):
        done = script(tmp_path / f"{name}.model", *options)
        assert done.returncode == 0, done.stderr
    a, b = (path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert a == b
    assert done.stdout.endswith(f"b.model, 300 ids + 100 sentinels: use it with data.tokenizer={tmp_path}/b.model\n")


def test_every_process_trains_the_same_tokenizer_on_a_corpus_that_it_samples(corpus, tmp_path):
    """SentencePiece's own sample is another one in every process, and only there."""
    code = """if True:
        import json, pathlib, sys
        from nanoT5 import tokenizer
        texts = [json.loads(line)["text"] for line in open(sys.argv[1])]
        tokenizer.TRAINING_SENTENCES = 300
        assert len(tokenizer.cut(texts)) > 600
        print(tokenizer.train(texts, 400, pathlib.Path(sys.argv[2])).sha256)
    """
    trained = [
        subprocess.run(
            [sys.executable, "-c", code, corpus, tmp_path / name], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in "ab"
    ]
    assert trained[0] == trained[1] and len(trained[0]) == 65


def test_byte_fallback_spells_what_has_no_piece(files, tiny, tmp_path):
    done = script(tmp_path / "x.model", "data=text", f"data.path={files}", "data.vocab_size=600", "--byte-fallback")
    assert done.returncode == 0, done.stderr
    given = tokenizer.load(str(tmp_path / "x.model"))
    (ids,) = given.encode(["a 🙂"])
    assert 2 not in ids and given.decode(ids) == "a 🙂"
    check_export(given, ["a 🙂", "日本語", "plain"], tmp_path / "export")
    summary = main.run([*tiny, f"data.tokenizer={tmp_path / 'x.model'}", f"hydra.run.dir={tmp_path / 'run'}"])
    assert summary["tokenizer"]["sha256"] == given.sha256


def test_sources_are_sampled_by_their_weights(files, corpus, capsys):
    parts = f"[{{source:text,path:{files},weight:3}},{{source:text,path:{corpus}}}]"
    cfg, _ = config.load(["data=mixture", f"data.mixture={parts}"])
    assert sum(map(len, train_tokenizer.texts(cfg, 40_000))) >= 40_000
    first, second = (
        int(n.replace(",", "")) for n in re.findall(r"sampled ([\d,]+) characters", capsys.readouterr().out)
    )
    assert 30_000 <= first < 35_000 and second >= 10_000


def test_a_sample_from_the_hub(documents, tmp_path):
    folder = tmp_path / "hub" / "owner" / "texts"
    folder.mkdir(parents=True)
    for i in range(4):
        (folder / f"train-{i}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in documents[i::4]))
    with hub.serving(tmp_path / "hub") as (address, _):
        env = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        done = script(tmp_path / "x.model", "data=hub", "data.name=owner/texts", "--vocab-size=300", **env)
    assert done.returncode == 0, done.stderr
    assert tokenizer.load(str(tmp_path / "x.model")).size == 400


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{folder}/x.model", "--vocab-size=many"], "data.vocab_size=many: it has to be a whole number"),
        (["{folder}/x.model", "--characters=0"], "--characters=0: it has to be a whole number from 1 up"),
        (["{folder}/x.model", "data.pfad=1"], "data.pfad"),
        (["data.vocab_size=300"], "has to end in .model"),
        (["{file}/x.model"], "name a folder that can be written"),
    ],
)
def test_mistakes(arguments, words, files, tmp_path, monkeypatch):
    arguments = [argument.format(folder=tmp_path, file=files / "0.jsonl") for argument in arguments]
    monkeypatch.setattr("sys.argv", ["train_tokenizer.py", *arguments, "data=text", f"data.path={files}"])
    with pytest.raises(UserError, match=words):
        train_tokenizer.command_line()
    assert not list(tmp_path.iterdir())


def test_a_mistake_ends_in_one_sentence(files, tmp_path):
    done = script(tmp_path / "x.model", "data=text", f"data.path={files}", "--vocab-size=90000")
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert re.fullmatch(r"nanoT5: data.vocab_size=90000 does not suit this corpus: .* <= \d+\.\n", done.stderr)
