"""Whole runs of the job, small ones, through the same doors as a user's."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from nanoT5 import UserError, config, curve, data, log, main, model, optim

ROOT = Path(main.__file__).parent.parent


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last_loss(folder: Path) -> float:
    """The mean of the training loss over the last log events, here only one."""
    return [event["train/loss"] for event in events(folder) if "train/loss" in event][-1]


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "checkpoints" / f"step-{step}" / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    """The folder of a run of 40 steps."""
    folder = tmp_path_factory.mktemp("run") / "finished"
    options = ["optim.total_steps=40", "eval.every_steps=15", "checkpoint.every_steps=20", "logging.every_steps=10"]
    main.run([*tiny, *options, f"hydra.run.dir={folder}"])
    return folder


def test_a_run_leaves_what_it_promises(finished):
    assert {path.name for path in finished.iterdir()} == {
        *("config.yaml", "metrics.jsonl", "summary.json", "curve.png", "checkpoints", "model")
    }
    assert {path.name for path in (finished / "checkpoints").iterdir()} == {"step-20", "step-40"}
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert OmegaConf.load(finished / "config.yaml").optim.total_steps == 40


def test_metrics(finished, tiny):
    training = [event for event in events(finished) if "train/loss" in event]
    assert [event["step"] for event in training] == [10, 15, 20, 30, 40]
    assert all(
        event.keys() - {"step"}
        == {
            f"train/{k}"
            for k in "loss lr grad_l2 weights_l2 bad_steps tokens_per_second data_wait input_tokens".split()
            + ["target_tokens"]
        }
        for event in training
    )
    last = training[-1]
    assert (last["train/input_tokens"], last["train/target_tokens"]) == (40 * 8 * 32, 40 * 8 * 8)
    assert last["train/loss"] < training[0]["train/loss"]
    assert last["train/lr"] == optim.cosine(39, 3e-2, OmegaConf.load(finished / "config.yaml"))
    weights = saved(finished, 40).values()
    assert last["train/weights_l2"] == pytest.approx(
        math.sqrt(sum((w.double() ** 2).sum().item() for w in weights)), rel=1e-5
    )
    evaluations = [event for event in events(finished) if "eval/loss" in event]
    assert [event["step"] for event in evaluations] == [15, 30, 40]
    shares = torch.tensor([evaluations[-1][key] for key in ("eval/alignment", "eval/alignment_chance")])
    assert shares.shape == (2, 2, 4) and ((0 < shares) & (shares < 1)).all()  # layers, heads
    entropy = [event["data/unigram_entropy"] for event in events(finished) if "data/unigram_entropy" in event]
    assert entropy == [pytest.approx(data.build(config.load(tiny)[0]).unigram_entropy)]


def test_summary(finished):
    summary = json.loads((finished / "summary.json").read_text())
    last = events(finished)[-1]
    assert (summary["eval/loss"], summary["eval/accuracy"]) == (last["eval/loss"], last["eval/accuracy"])
    assert summary["step"] == 40 and not summary["interrupted"]
    assert summary["curve"] == curve.shapes(events(finished))
    assert (
        summary["curve"]["training"]["final"] == last_loss(finished) and summary["curve"]["training"]["escape"] is None
    )
    assert summary["corpus"][0]["files"] == 1 and summary["versions"]["torch"] == torch.__version__


def test_export_loads_in_transformers_with_the_same_loss(finished, tiny):
    exported = AutoModelForSeq2SeqLM.from_pretrained(finished / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    summary = json.loads((finished / "summary.json").read_text())
    assert sum(p.numel() for p in exported.parameters()) == summary["parameters"]
    text = data.build(config.load(tiny)[0])
    with torch.no_grad():
        outputs = [exported(**batch) for batch in text.evaluation]
    assert sum(o.loss.item() for o in outputs) / len(outputs) == pytest.approx(summary["eval/loss"], abs=1e-4)
    prompt = tokenizer("This module <extra_id_0> the file.", return_tensors="pt")
    assert tokenizer.convert_tokens_to_ids("<extra_id_0>") in prompt.input_ids
    answer = exported.generate(**prompt, max_new_tokens=8)
    assert answer[0, 0] == 0 and tokenizer.decode(answer[0]).startswith("<pad><extra_id_0>")


def test_small_embeddings_are_exported_with_their_norm_folded_in(tiny, tmp_path):
    """The export has T5's own parameters, and Transformers' code makes the same predictions with it."""
    summary = main.run([*tiny, "model.init=small_embedding", f"hydra.run.dir={tmp_path}"])
    exported = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert sum(p.numel() for p in exported.parameters()) == summary["parameters"] - 32  # the norm's
    with torch.no_grad():
        outputs = [exported(**batch) for batch in data.build(config.load(tiny)[0]).evaluation]
    assert sum(o.loss.item() for o in outputs) / len(outputs) == pytest.approx(summary["eval/loss"], abs=1e-4)


def test_a_blind_run_learns_nothing_from_the_encoder(tiny, tmp_path):
    main.run([*tiny, "model.blind_encoder=true", "checkpoint.every_steps=3", f"hydra.run.dir={tmp_path / 'whole'}"])
    resume = f"checkpoint.resume={tmp_path}/whole/checkpoints/step-3"
    main.run([*tiny, "model.blind_encoder=true", resume, f"hydra.run.dir={tmp_path / 'resumed'}"])
    three, six = saved(tmp_path / "whole", 3), saved(tmp_path / "whole", 6)
    assert equal(six, saved(tmp_path / "resumed", 6))
    for name in three:
        unseen = name.startswith("encoder") or "EncDecAttention" in name or "layer.1.layer_norm" in name
        assert torch.equal(three[name], six[name]) == (unseen and "embed" not in name), name


def test_the_held_out_loss_can_be_measured_again(finished, tiny, tmp_path):
    summary = json.loads((finished / "summary.json").read_text())
    for i, path in enumerate((finished / "model", finished / "checkpoints/step-40")):
        options = ["eval_only=true", f"model.checkpoint_path={path}", f"hydra.run.dir={tmp_path / str(i)}"]
        again = main.run([*tiny, *options])
        assert again["eval/loss"] == pytest.approx(summary["eval/loss"], rel=1e-6)


def test_runs_repeat_to_the_bit(tiny, tmp_path):
    """Twice in one process; workers, logging, evaluation and checkpoints change nothing; the seed does."""
    options = {
        "a": [],
        "b": [
            "data.num_workers=2",
            "logging.every_steps=1",
            "eval.every_steps=2",
            "checkpoint.every_steps=4",
            "eval.steps=1",
        ],
        "c": ["seed=1"],
    }
    for name, extra in options.items():
        main.run([*tiny, *extra, "model.dropout_rate=0.1", f"hydra.run.dir={tmp_path / name}"])
    a, b, c = (saved(tmp_path / name, 6) for name in options)
    assert equal(a, b)
    assert not any(torch.equal(a[name], c[name]) for name in a if "norm" not in name)


def test_a_resumed_run_is_the_same_to_the_bit(finished, tiny, tmp_path):
    checkpoint = finished / "checkpoints" / "step-20"
    main.run([*tiny, "optim.total_steps=40", f"checkpoint.resume={checkpoint}", f"hydra.run.dir={tmp_path}"])
    assert equal(saved(tmp_path, 40), saved(finished, 40))
    assert events(tmp_path)[-1]["eval/loss"] == events(finished)[-1]["eval/loss"]
    with pytest.raises(UserError, match="at step 40 already"):
        main.run(
            [
                *tiny,
                "optim.total_steps=40",
                f"checkpoint.resume={tmp_path}/checkpoints/step-40",
                f"hydra.run.dir={tmp_path}/2",
            ]
        )
    assert events(tmp_path)[-2]["train/target_tokens"] == events(finished)[-2]["train/target_tokens"]


def test_micro_batches_equal_one_big_batch(tiny, tmp_path):
    for acc in (1, 4):
        main.run([*tiny, f"optim.grad_acc={acc}", "logging.every_steps=1", f"hydra.run.dir={tmp_path / str(acc)}"])
    one, four = ([e["train/loss"] for e in events(tmp_path / acc) if "train/loss" in e] for acc in ("1", "4"))
    assert len(one) == 6 and one == pytest.approx(four, rel=1e-5)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_every_optimizer_trains_and_resumes_to_the_bit(tiny, tmp_path, name):
    options = [f"optim.name={name}", "optim.rms_scale=init", "optim.total_steps=24", "checkpoint.every_steps=12"]
    main.run([*tiny, *options, "optim.grad_acc=2", f"hydra.run.dir={tmp_path / 'whole'}"])
    resume = f"checkpoint.resume={tmp_path}/whole/checkpoints/step-12"
    main.run([*tiny, *options, "optim.grad_acc=2", resume, f"hydra.run.dir={tmp_path / 'resumed'}"])
    assert equal(saved(tmp_path / "whole", 24), saved(tmp_path / "resumed", 24))
    assert not equal(saved(tmp_path / "whole", 12), saved(tmp_path / "whole", 24))


@pytest.fixture(scope="module")
def long_enough(tiny) -> list[str]:
    shape = ["model.num_layers=1", "model.num_decoder_layers=1"]
    return [*tiny, *shape, "optim.total_steps=200", "eval.every_steps=200"]


@pytest.fixture(scope="module")
def reference(long_enough, tmp_path_factory) -> Path:
    """Transformers' own code, trained for 200 steps."""
    folder = tmp_path_factory.mktemp("run") / "reference"
    main.run([*long_enough, "model.klass=hf_t5", f"hydra.run.dir={folder}"])
    return folder


WAYS = {"plain": [], "compiled": ["model.compile=true"], "checkpointed": ["model.activation_checkpointing=true"]}


@pytest.mark.parametrize("way", WAYS)
def test_training_ends_where_transformers_ends(reference, long_enough, tmp_path, way):
    """After 200 steps, whatever makes ours faster or smaller."""
    main.run([*long_enough, *WAYS[way], f"hydra.run.dir={tmp_path}"])
    ours, theirs = events(tmp_path)[-1], events(reference)[-1]
    assert ours["eval/loss"] == pytest.approx(theirs["eval/loss"], rel=2e-3)
    assert ours["eval/alignment"] == [[pytest.approx(share, abs=0.01) for share in theirs["eval/alignment"][0]]]
    exported = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert torch.equal(exported.lm_head.weight, saved(tmp_path, 200)["lm_head.weight"])


@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx512_bf16"), reason="this processor has no bf16")
def test_bf16_ends_within_its_rounding(reference, long_enough, tmp_path):
    main.run([*long_enough, "precision=bf16", f"hydra.run.dir={tmp_path}"])
    exact, rounded = (events(folder)[-1]["eval/loss"] for folder in (reference, tmp_path))
    assert rounded == pytest.approx(exact, rel=0.01) and rounded != exact


@pytest.mark.parametrize("klass", ["local_t5", "hf_t5"])
def test_activation_checkpointing_keeps_less_and_changes_nothing(long_enough, tmp_path, klass):
    kept, gradients = {}, {}
    for checkpointing in (True, False):
        cfg, _ = config.load([*long_enough, f"model.klass={klass}", "model.dropout_rate=0.1"])
        cfg.model.activation_checkpointing = checkpointing
        accelerator = main.set_up(cfg)
        t5 = main.build_model(cfg, model.t5_config(300, 0, 1, **{k: cfg.model[k] for k in main.SHAPE}), accelerator)
        ids = torch.arange(160).reshape(4, 40) + 2
        torch.manual_seed(0)  # of dropout, which has to be the same when activations are computed again
        kept[checkpointing] = 0

        def keep(tensor, checkpointing=checkpointing):
            kept[checkpointing] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = t5.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients[checkpointing] = {name: p.grad for name, p in t5.named_parameters()}
    assert kept[True] < kept[False] / 2 and equal(gradients[True], gradients[False])


@pytest.mark.parametrize(
    "device, steps, pays", [("cuda", 999, False), ("cuda", 1000, True), ("cpu", 4999, False), ("cpu", 5000, True)]
)
def test_only_long_runs_are_compiled(tiny, monkeypatch, device, steps, pays):
    cfg, _ = config.load([*tiny, f"optim.total_steps={steps}"])
    monkeypatch.setattr(main.shutil, "which", lambda name: "/usr/bin/c++")
    assert main.compiling_pays(cfg, torch.device(device)) is pays
    monkeypatch.setattr(main.shutil, "which", lambda name: None)
    assert main.compiling_pays(cfg, torch.device(device)) is (pays and device == "cuda")


def test_a_dry_run_says_what_the_run_takes(tiny, tmp_path, capsys):
    answer = main.run([*tiny, "dryrun=true", "optim.total_steps=4000", f"hydra.run.dir={tmp_path / 'run'}"])
    said = capsys.readouterr().out
    assert 1 < answer["seconds"] < 4000 and 2**26 < answer["memory_bytes"] < 2**36 and not answer["interrupted"]
    assert "4,000 of them" in said and f"about {log.duration(answer['seconds'])}" in said
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.yaml"}
    main.run([*tiny, f"hydra.run.dir={tmp_path / 'run'}"])
    before = (tmp_path / "run" / "config.yaml").read_text()
    main.run([*tiny, "dryrun=true", "optim.total_steps=12", f"hydra.run.dir={tmp_path / 'run'}"])
    assert "6 of them" in capsys.readouterr().out and (tmp_path / "run" / "config.yaml").read_text() == before


def test_a_run_stops_after_max_hours_and_goes_on(tiny, finished, tmp_path):
    options = ["optim.total_steps=40", "eval.every_steps=15", "checkpoint.every_steps=20", "logging.every_steps=10"]
    stopped = main.run([*tiny, *options, "max_hours=1e-9", f"hydra.run.dir={tmp_path}"])
    assert stopped["interrupted"] and stopped["step"] == 1
    main.run([*tiny, *options, f"hydra.run.dir={tmp_path}"])
    assert equal(saved(tmp_path, 40), saved(finished, 40))


def test_weights_to_start_from(finished, tiny, tmp_path):
    options = [
        "model.random_init=false",
        f"model.checkpoint_path={finished / 'model'}",
        "optim.base_lr=1e-12",
        "optim.final_cosine=0",
    ]
    main.run([*tiny, *options, f"hydra.run.dir={tmp_path}"])
    start, end = saved(finished, 40), saved(tmp_path, 6)
    assert all(torch.allclose(start[name], end[name], atol=1e-6) for name in start)


# ---- on the command line ----


def test_help_tells_the_defaults_as_they_are():
    with command("--help") as process:
        said, _ = process.communicate()
    cfg, _ = config.load([])
    shown = dict(re.findall(r"^ +([a-z_.]+)=(\S+) ", said, re.MULTILINE))
    assert len(shown) == 10 and shown.pop("hydra.run.dir") == f"logs/DATE/TIME-{cfg.tag}"
    assert shown.pop("model") == "nano" and shown.pop("data") == cfg.data.source
    for key, value in shown.items():
        now = OmegaConf.select(cfg, key)
        assert value == ("null" if now is None else str(now)), key


def command(*overrides, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "nanoT5.main", *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_complete(tiny, tmp_path, number):
    process = command(
        *tiny,
        "optim.total_steps=1000000",
        "logging.every_steps=1",
        "data.num_workers=2",
        f"hydra.run.dir={tmp_path / 'run'}",
        start_new_session=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, number)  # as a terminal does, to the workers too
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] and summary["step"] >= events(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "curve.png").exists()
    assert (tmp_path / "run" / "checkpoints" / f"step-{summary['step']}" / "state.json").exists()
    assert "held-out loss" in out


def test_multirun(tiny, tmp_path):
    process = command("-m", *tiny, "optim.name=adamw,adamwscale", f"hydra.sweep.dir={tmp_path}", "optim.total_steps=3")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    names = [OmegaConf.load(tmp_path / str(i) / "config.yaml").optim.name for i in range(2)]
    assert names == ["adamw", "adamwscale"]
    assert all((tmp_path / str(i) / "summary.json").exists() for i in range(2))


def test_header_and_log_lines(tiny, tmp_path):
    process = command(*tiny, "logging.every_steps=2", f"hydra.run.dir={tmp_path}")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    for word in ("run ", "cpu", "fp32", "parameters", "MB", "512 ids", "micro batch", "about", "tokens/s"):
        assert word in out
    assert out.count("tokens/s") == 3


def faulty(tmp_path, corpus):
    """(overrides, words that the one sentence must have)"""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "small.txt").write_text("A few words of text.\n\nAnd a few more.\n")
    (tmp_path / "file").touch()
    return {
        "optm.lr=1": ["optm.lr", "is not a key"],
        "optim.lr=1": ["optim.lr", "is not a key"],
        "+optim.learning_rate=1": ["optim.learning_rate", "is not a key"],
        "optim.batchsize=4": ["did you mean optim.batch_size?"],
        "model=tiny": ["tiny", "nano"],
        "optim.batch_size=abc": ["optim.batch_size=abc", "whole number"],
        "optim.batch_size=1.5": ["optim.batch_size=1.5", "whole number"],
        "optim.batch_size=null": ["optim.batch_size=null", "whole number"],
        "optim.base_lr=true": ["optim.base_lr", "number"],
        "optim.base_lr=-1": ["optim.base_lr", "above 0"],
        "optim.base_lr=nan": ["optim.base_lr", "above 0"],
        "optim.name=adam": ["optim.name=adam", "adamwscale"],
        "optim.rms_scale=0": ["optim.rms_scale", "True, False, init"],
        "optim.grad_acc=3": ["optim.batch_size=8", "optim.grad_acc=3"],
        "optim.warmup_steps=6": ["optim.warmup_steps", "optim.total_steps"],
        "eval.steps=0": ["eval.steps=0", "from 1 up"],
        "data.input_length=4": ["data.input_length", "spans"],
        "data.input_length=4000": ["data.input_length", "spans"],
        "data.mlm_probability=0": ["data.mlm_probability", "between 0 and 1"],
        "data.held_out=1e-9": ["data.held_out", "evaluation"],
        "data.num_workers=9": ["data.num_workers=9", "data.streams"],
        "data.path=null": ["data.path", "text"],
        "data.text_column=body": ["text.jsonl, line", 'no string called "body"'],
        "data.mixture=[{source:docstrings}]": ["data.mixture", "data=mixture"],
        "data.name=x/y": ["data.name=x/y", "data=hub"],
        "model.init=xavier": ["model.init=xavier", "small_embedding"],
        "model.init_std=0": ["model.init_std=0", "above 0"],
        "data=docstrings": ["data.path", "data=text"],
        "data=null": ["group", "must be"],
        "data=txt": ["data=txt: it has to be one of c4, docstrings, ", ", text"],
        "~optim.grad_clip": ["optim.grad_clip is missing"],
        "seed=???": ["seed"],
        "seed=10000000000": ["seed=10000000000", "to 2147483647"],
        "tag=42": ["tag=42", "in quotes"],
        "optim.name=${oops}": ["oops"],
        "eval_only=0": ["eval_only=0", "True, False"],
        f"data.path={tmp_path}/none.txt": ["none.txt", "no file"],
        f"data.path={tmp_path}/empty.txt": ["empty.txt", "no text"],
        f"data.path={tmp_path}/small.txt": ["data.vocab_size=512", "<="],
        f"data.path={tmp_path}/file": ["file", ".txt"],
        "data.vocab_size=80000": ["data.vocab_size=80000", "<="],
        f"data.tokenizer={corpus}": ["text.jsonl", "SentencePiece"],
        f"data.cache={tmp_path}/file/cache": ["data.cache", "folder"],
        "device=gpu": ["device=gpu", "device=cpu"],
        "precision=fp16": ["precision=fp16", "bf16"],
        "model.checkpoint_path=/nowhere": ["model.checkpoint_path", "model.random_init"],
        "model.random_init=false": ["model.checkpoint_path", "random_init"],
        "eval_only=true": ["model.checkpoint_path", "eval_only"],
        "checkpoint.resume=/nowhere": ["/nowhere", "checkpoint.resume"],
        "optim.batch_size=20000": ["optim.batch_size=20000", "smaller than a batch"],
        f"hydra.run.dir={tmp_path}/file": ["hydra.run.dir", "cannot be written"],
        "data.path=[": ["data.path=[", "quotes"],
    }


def test_mistakes_get_a_sentence_that_names_the_remedy(tiny, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trained = []
    monkeypatch.setattr(main.Step, "__call__", lambda *_, **__: trained.append(1))
    for i, (override, words) in enumerate(faulty(tmp_path, corpus).items()):
        options = [*tiny, f"hydra.run.dir={tmp_path / f'run{i}'}", override]
        monkeypatch.setattr(sys, "argv", ["nanoT5", *options])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        sentence = stopped.value.code
        assert isinstance(sentence, str) and sentence.startswith("nanoT5: "), override
        assert "\n" not in sentence and all(word in sentence for word in words), (override, sentence)
    assert not trained


def test_a_mixture_needs_its_sources():
    with pytest.raises(UserError, match="data.mixture and data=mixture need each other"):
        config.check(config.load(["data=mixture"])[0])


def test_all_faults_are_reported_at_once():
    with pytest.raises(UserError) as error:
        config.check(config.load(["optim.batch_size=0", "seed=x", "+new=1", "~eval"])[0])
    assert len(str(error.value).splitlines()) == 3 + 3


def test_mistakes_show_no_traceback_and_train_nothing(tmp_path):
    process = command("optim.batch_size=0", f"hydra.run.dir={tmp_path / 'run'}")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == "" and not (tmp_path / "run").exists()
    assert err == "nanoT5: optim.batch_size=0: it has to be a whole number from 1 up\n"


def test_a_second_run_does_not_overwrite_the_first(finished, tiny):
    before = (finished / "summary.json").read_text(), (finished / "metrics.jsonl").read_text()
    for more, words in (
        (["checkpoint.resume=never"], "already holds a run"),
        (["optim.total_steps=40"], "at step 40 already"),
        (["optim.total_steps=80", "model.d_ff=16"], "another configuration .model.d_ff=48 there, 16 here"),
        (["eval_only=true", f"model.checkpoint_path={finished / 'model'}"], "already holds a run"),
    ):
        with pytest.raises(UserError, match=words):
            main.run([*tiny, *more, f"hydra.run.dir={finished}"])
    assert before == ((finished / "summary.json").read_text(), (finished / "metrics.jsonl").read_text())


def test_weights_of_another_shape_are_refused(finished, tiny, tmp_path):
    options = [
        "eval_only=true",
        f"model.checkpoint_path={finished / 'model'}",
        "model.d_ff=16",
        f"hydra.run.dir={tmp_path}",
    ]
    with pytest.raises(UserError, match=r"does not fit the model: .*wi_0.weight is \[48, 32\] there, \[16, 32\] here"):
        main.run([*tiny, *options])


def test_divergence_stops_the_run(tiny, tmp_path):
    options = [
        "optim.base_lr=3e38",
        "optim.warmup_steps=0",
        "optim.grad_clip=0",
        "logging.every_steps=50",
        "optim.total_steps=50",
    ]
    with pytest.raises(log.Diverged, match=r"step \d+: .* optim.base_lr; last good checkpoint: none was saved yet"):
        main.run([*tiny, *options, f"hydra.run.dir={tmp_path}"])
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "model").exists()


def test_bad_steps_are_skipped_and_counted(tiny, tmp_path, monkeypatch, capsys):
    """One changes nothing but the count; too many in a row end the run, with what is needed to look into it."""
    clean, kept = main.Step.gradients, []

    def gradients(self, batch):
        loss = clean(self, batch)
        if self.optimizer.param_groups[0]["steps"] in bad and len(kept) < limit:
            kept.append([p.clone() for p in self.trained.parameters()])
            next(self.trained.parameters()).grad[0] = math.nan
        return loss

    monkeypatch.setattr(main.Step, "gradients", gradients)
    options = ["optim.total_steps=20", "checkpoint.every_steps=5", "logging.every_steps=20", "optim.max_bad_steps=4"]
    bad, limit = {6}, 3  # three times at the seventh step
    summary = main.run([*tiny, *options, f"hydra.run.dir={tmp_path / 'few'}"])
    assert summary["bad_steps"] == 3 and math.isfinite(last_loss(tmp_path / "few"))
    assert all(torch.equal(a, b) for a, b in zip(kept[0], kept[2]))
    assert capsys.readouterr().out.count("step skipped") == 3

    kept.clear()
    limit = 100
    with pytest.raises(log.Diverged) as error:
        main.run([*tiny, *options, f"hydra.run.dir={tmp_path / 'many'}"])
    assert "step 10: 4 steps in a row, the last one on samples 72 to 79, were skipped" in str(error.value)
    assert str(error.value).endswith(f"{tmp_path}/many/checkpoints/step-5")


def test_every_shipped_config_is_checked():
    needed = {
        "text": ["data.path=x"],
        "saved": ["data.path=x"],
        "hub": ["data.name=x/y"],
        "mixture": ["data.mixture=[{source:docstrings},{source:text,path:a.txt,weight:2}]"],
    }
    for group in ("model", "data", "task"):
        for path in (config.FOLDER / group).glob("*.yaml"):
            config.check(config.load([f"{group}={path.stem}", *needed.get(path.stem, [])])[0])
    keys = config.flat(config.load(["data=text"])[0]).keys()
    assert keys == config.RULES.keys()


def test_every_key_has_a_comment():
    for path in config.FOLDER.rglob("*.yaml"):
        for line in path.read_text().split("\nhydra:")[0].splitlines():
            if line.strip() and not line.strip().startswith(("#", "-")) and not line.rstrip().endswith(":"):
                assert "#" in line or path.parent.name in ("model", "accelerate"), (path, line)
