import subprocess
import sys

import pytest
import torch

from nanoT5 import UserError, fill, main

TEXT = "Return the <extra_id_0> of the list, or <extra_id_1> if there is none."


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """The folder of a run that has learned at least to end its spans."""
    folder = tmp_path_factory.mktemp("fill") / "run"
    main.run([*tiny, "optim.total_steps=300", "model.init=t5", "eval.every_steps=300", f"hydra.run.dir={folder}"])
    return folder


def test_spans_are_those_that_transformers_generates(run):
    model, tokenizer = fill.load(run)
    spans = fill.fill(model, tokenizer, TEXT)
    assert len(spans) == 2
    written = [model.config.decoder_start_token_id]
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids([f"<extra_id_{k}>" for k in range(100)])]
    for k, span in enumerate(spans):
        written.append(tokenizer.convert_tokens_to_ids(f"<extra_id_{k}>"))
        result = model.generate(
            **tokenizer(TEXT, return_tensors="pt"),
            decoder_input_ids=torch.tensor([written]),
            eos_token_id=ends,
            max_new_tokens=fill.LONGEST,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens = result.sequences[0, len(written) :].tolist()
        scores = torch.stack(result.scores)[:, 0].softmax(-1)
        assert span.probability == pytest.approx(scores[torch.arange(len(tokens)), tokens].prod().item(), rel=1e-4)
        if tokens[-1] in ends:
            tokens.pop()
        assert span.text == tokenizer.decode(tokens)
        written += tokens


@pytest.mark.parametrize(
    "text", ["nothing to fill", "<extra_id_1> first", "<extra_id_0> and <extra_id_0>", "<extra_id_0> <extra_id_2>"]
)
def test_texts_that_cannot_be_filled(run, text):
    with pytest.raises(UserError, match="in this order"):
        fill.fill(*fill.load(run), text)


def test_more_spans_than_sentinels(run):
    with pytest.raises(UserError, match="101 spans"):
        fill.fill(*fill.load(run), " ".join(f"a <extra_id_{k}>" for k in range(101)))


def test_the_command(run, tmp_path):
    def command(*arguments, **options):
        words = [sys.executable, "-m", "nanoT5.fill", *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, **options)

    named = command(run, TEXT)
    assert named.returncode == 0 and not named.stderr
    filled, first, second = named.stdout.splitlines()
    assert (
        filled.startswith("Return the [") and first.split()[0] == "<extra_id_0>" and 0 < float(second.split()[1]) <= 1
    )
    assert command(run / "model", input=f"{TEXT}\n{TEXT}\n").stdout == 2 * named.stdout
    missing = command(tmp_path, TEXT)
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1 and "holds no trained model" in missing.stderr
