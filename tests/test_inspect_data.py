import inspect_data
import numpy as np

from nanoT5 import config, corruption, data


def test_a_chunk_is_put_together_again(tiny):
    text = data.build(config.load(tiny)[0])
    chunks = np.random.default_rng(0).integers(10, 400, (50, text.raw_length))
    ids = {"sentinel_ids": text.tokenizer.sentinel_ids, "eos_id": text.tokenizer.eos_id}
    inputs, targets = corruption.corrupt(chunks, np.arange(50), seed=0, noise_density=0.15, mean_span_length=3.0, **ids)
    whole = [inspect_data.whole(*rows, text.tokenizer) for rows in zip(inputs, targets)]
    assert whole == chunks.tolist()


def test_what_is_shown(tiny, documents, capsys):
    inspect_data.inspect(tiny, count=2)
    said = capsys.readouterr().out
    assert said.count("\ndocument ") == said.count("\nchunk ") == said.count("\ninput ") == said.count("\ntarget ") == 2
    quoted = [line.strip() for line in said.splitlines() if line.startswith("           ")]
    assert all(any(repr(text[: inspect_data.SHOWN]) in line for text in documents) for line in quoted)
    assert "<extra_id_0>" in said and "32 tokens: " in said
