import numpy as np
import pytest
import sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanoT5 import UserError, tokenizer


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
    assert exported(documents, add_special_tokens=False)["input_ids"] == trained.encode(documents)
    assert len(exported) == trained.size
    assert exported.convert_tokens_to_ids([f"<extra_id_{k}>" for k in range(100)]) == trained.sentinel_ids.tolist()


def test_a_saved_folder_can_be_given(trained, documents, tmp_path):
    trained.save(tmp_path / "both")
    AutoTokenizer.from_pretrained(tmp_path / "both").save_pretrained(tmp_path / "json only")
    (tmp_path / "t5.model").write_bytes((tmp_path / "both" / "spiece.model").read_bytes())
    for name in ("both", "json only", "t5.model"):
        loaded = tokenizer.load(str(tmp_path / name))
        assert loaded.encode(documents[:5]) == trained.encode(documents[:5]), name
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


def test_a_tokenizer_without_sentinels_is_refused(trained, tmp_path):
    trained.save(tmp_path)
    plain = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer
    PreTrainedTokenizerFast(
        tokenizer_object=type(plain).from_str(plain.to_str().replace("extra_id", "mask"))
    ).save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="has no pad, eos, <extra_id_0>"):
        tokenizer.load(str(tmp_path / "plain"))
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="Transformers can load"):
        tokenizer.load(str(tmp_path / "plain"))


def test_a_sentencepiece_model_without_pad_is_refused(documents, tmp_path):
    lines = iter("\n".join(documents).splitlines())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=str(tmp_path / "plain"), vocab_size=200, minloglevel=2
    )
    with pytest.raises(UserError, match="plain.model has no <pad>"):
        tokenizer.load(str(tmp_path / "plain.model"))


def test_what_is_no_tokenizer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "x.model").write_text("text")
    for name, words in ((tmp_path / "x.model", "not a SentencePiece model"), (tmp_path / "nowhere", "neither")):
        with pytest.raises(UserError, match=words):
            tokenizer.load(str(name))


def test_shared_ids_are_refused(trained):
    for change in ({"eos_id": 0}, {"pad_id": -1}, {"sentinel_ids": np.roll(trained.sentinel_ids, 1)}, {"size": 600}):
        with pytest.raises(UserError, match="data.tokenizer"):
            tokenizer.checked(tokenizer.Tokenizer(**(vars(trained) | change)))


def test_a_vocabulary_larger_than_the_text_allows_is_refused(documents, tmp_path):
    with pytest.raises(UserError, match="data.vocab_size=90000.*<="):
        tokenizer.train(documents, 90_000, tmp_path)
    with pytest.raises(UserError, match="data.vocab_size=20.*"):
        tokenizer.train(documents, 20, tmp_path)
