"""Pretrain a T5 by span corruption: python -m nanoT5.main [key=value ...]

The one file to read first. train() is the whole job: set up, build, loop over steps, finish. A run is a folder:

  config.yaml           the resolved config
  metrics.jsonl         one JSON object a log event, the only source of curves
  checkpoints/step-N/   weights, optimizer state and data state, to go on from (checkpoint.resume)
  model/                the trained model and its tokenizer, in Transformers' format
  curve.png, summary.json
"""

import ctypes
import errno
import fcntl
import functools
import itertools
import math
import os
import platform
import resource
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

import hydra
import torch
import torch.utils.checkpoint
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, gather_object
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import T5Config

from nanoT5 import UserError, checkpoint, config, curve, data, log, model, optim, relora, trackers
from nanoT5.step import Batch, Evaluator, Step

SHAPE = ("d_model", "d_kv", "num_heads", "d_ff", "num_layers", "num_decoder_layers", "dropout_rate")  # as in T5Config
DIVERGED = 3  # exit status, for whoever runs many: 0 is a finished run, 1 a mistake, 130 an interrupted run


def train(cfg: DictConfig, folder: Path) -> dict:
    """Run the job that cfg describes in a run folder; returns what summary.json holds."""
    started = time.perf_counter()
    deadline = started + (cfg.max_hours or math.inf) * 3600
    config.check(cfg)
    accelerator = set_up(cfg, folder)
    lock, begin = enter(cfg, folder) if accelerator.is_main_process else (None, None)
    (begin,) = broadcast_object_list([begin])
    precision = choose_precision(cfg, accelerator.device)

    with accelerator.local_main_process_first():  # it fills the cache that the others read
        text = data.build(cfg)
    shape = model_shape(cfg, text.tokenizer)
    state: dict = {"progress": {"faults": text.held_out.faults}, "optimizer_steps": None}
    if begin:
        state = checkpoint.read(begin, cfg, text.origin, accelerator.print)
    progress = log.Progress(**state["progress"])
    t5, trained, optimizer = assemble(cfg, shape, accelerator, progress.step, begin, state["optimizer_steps"])
    evaluator = Evaluator(t5, text.evaluation, text.tokenizer.sentinel_ids, precision, accelerator)
    if cfg.eval_only:
        summary = evaluator() | {"checkpoint": cfg.model.checkpoint_path, "interrupted": False}
        if lock:  # the main process
            log.write_config(lock, cfg)
            log.write_summary(folder, summary)
        return summary

    if not accelerator.is_main_process:
        progress.faults = []
    # a run that was killed between its last checkpoint and its summary has those things to do that follow the loop
    last = done = progress.step == cfg.optim.total_steps and begin.parent.parent == folder
    if progress.step >= cfg.optim.total_steps and (not done or (folder / "summary.json").exists()):
        raise UserError(
            f"{begin} is at step {progress.step} already: raise optim.total_steps, or name another run folder"
        )
    batches = text.batches(progress.data, accelerator.process_index, accelerator.num_processes)
    schedule = optim.SCHEDULES[cfg.optim.lr_scheduler]
    step = Step(trained, optimizer, accelerator, precision, cfg.optim, cfg.seed)

    first = next(batches)
    step_seconds = step.rehearse(first[0])
    evaluator.rehearse()
    batches = itertools.chain([first], batches)
    if lock:
        log.print_header(header(cfg, folder, begin, accelerator, precision, text, t5, progress, step_seconds))
    if cfg.dryrun:
        return dry_run(cfg, progress.step, accelerator, step, evaluator, first[0])
    if lock:
        log.write_config(lock, cfg)
        (folder / "summary.json").unlink(missing_ok=True)  # of an interruption: it says that a run has ended
    trackers.start(accelerator, config.flat(cfg), folder)
    events = log.Log(folder, cfg.optim.total_steps, progress, begin, accelerator.is_main_process, accelerator.log)

    def save() -> Path:
        of_all = {"data": data.merged(gather_object([progress.data])), "faults": gather_object(progress.faults)}
        state = {"progress": asdict(progress) | of_all, "config": config.flat(cfg), "origin": text.origin}
        return checkpoint.save(
            folder / "checkpoints", t5, optimizer, state, cfg.checkpoint.keep, accelerator.is_main_process
        )

    if accelerator.is_main_process and not events.history:
        events.write({"data/unigram_entropy": text.unigram_entropy})
    with stop_on_signal() as stop, trackers.closed_by_errors(accelerator):
        while not last:
            with events.waiting():
                batch, progress.data, faults = next(batches)
            lr = schedule(progress.step, optimizer.defaults["lr"], cfg)
            loss, grad_l2 = step(batch, lr, progress.step)
            progress.advance(batch, accelerator.num_processes, faults, lr, loss, grad_l2)
            events.step(cfg.optim)

            done = progress.step == cfg.optim.total_steps
            last = done or agree(accelerator, stop.is_set() or time.perf_counter() > deadline)
            evaluate = done or progress.step % cfg.eval.every_steps == 0
            adapters_begin = relora.begins(cfg.relora, progress.step) and not last
            keep = done or adapters_begin or progress.step % cfg.checkpoint.every_steps == 0
            if not done and relora.restarts(cfg.relora, progress.step):
                relora.restart(t5, optimizer, cfg.relora, cfg.seed, progress.step)
            if evaluate or keep or progress.step % cfg.logging.every_steps == 0:
                events.training(t5, optimizer)  # before a checkpoint, so that no diverged weights are ever saved
            if evaluate:
                events.evaluation(evaluator())
            if keep or last:
                events.saved(save())
            if adapters_begin:  # as in a run that goes on from this checkpoint
                accelerator.wait_for_everyone()  # until the main process has written it
                steps = [group["steps"] for group in optimizer.param_groups]
                t5, trained, optimizer = assemble(cfg, shape, accelerator, progress.step, events.checkpoint, steps)
                step, evaluator = replace(step, trained=trained, optimizer=optimizer), replace(evaluator, t5=t5)

    events.close()
    if not done or not events.last_evaluation:  # a run that never stopped would not have it in its metrics
        events.last_evaluation = evaluator()
    checkpoint.export(folder / "model", t5, shape, text.tokenizer, accelerator.is_main_process)
    facts = {
        "interrupted": not done,
        "seconds": round(time.perf_counter() - started, 1),
        "parameters": sum(p.numel() for p in t5.parameters()),
        "trainable_parameters": sum(p.numel() for p in t5.parameters() if p.requires_grad),
        "device": accelerator.device.type,
        "processes": accelerator.num_processes,
        "precision": precision,
        "corpus": [corpus.description for corpus in text.corpora],
        "data": data.merged(gather_object([progress.data]))["counts"],
        "held_out": dict(text.held_out.counts),
        "tokenizer": {"description": text.tokenizer.description, "sha256": text.tokenizer.sha256},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    counts = {key: getattr(progress, key) for key in ("step", "input_tokens", "target_tokens", "bad_steps")}
    summary = events.last_evaluation | counts | facts
    if accelerator.is_main_process:
        curve.draw([folder], folder / "curve.png")
        summary |= {"curve": curve.shapes(curve.read(folder))}
        log.write_summary(folder, summary)
        trackers.finish(accelerator, summary, progress.step, folder / "curve.png")
    accelerator.wait_for_everyone()  # a launcher ends all processes when the first one is gone
    return summary


def dry_run(
    cfg: DictConfig, done: int, accelerator: Accelerator, step: Step, evaluator: Evaluator, batch: Batch
) -> dict:
    """Take one step and one evaluation; returns, and says, what the run would take after the steps already done."""
    marks = [time.perf_counter()]
    step(batch, step.optimizer.defaults["lr"], 0)
    marks.append(time.perf_counter())
    evaluator()
    marks.append(time.perf_counter())
    step_seconds, evaluation_seconds = (after - before for before, after in itertools.pairwise(marks))
    steps = cfg.optim.total_steps - done
    evaluations = math.ceil(steps / cfg.eval.every_steps)
    if accelerator.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    seconds = step_seconds * steps + evaluation_seconds * evaluations
    if accelerator.is_main_process:
        rows = {
            "memory": f"{memory / 2**30:.1f} GiB at most, in each process",
            "a step": f"{step_seconds:.3f} s, {steps:,} of them",
            "evaluation": f"{evaluation_seconds:.2f} s, {evaluations:,} of them",
            "the run": f"about {log.duration(seconds)}; dryrun=true ends here",
        }
        log.print_header(rows)
    return {"seconds": seconds, "memory_bytes": memory, "interrupted": False}


# ---------------------------------------------------------------------------------------------------------------------
# Setting up


def set_up(cfg: DictConfig, folder: Path | None = None) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)  # a notebook may run on another device than before
    gpu = torch.cuda.is_available()
    if cfg.device == "gpu" and not gpu:
        raise UserError(
            "device=gpu, but torch finds no CUDA GPU: say device=cpu, or install a torch build for your GPU"
        )
    trackers.check(cfg.logging.trackers)
    tracking = list(cfg.logging.trackers) or None
    accelerator = Accelerator(cpu=cfg.device == "cpu" or not gpu, log_with=tracking, project_dir=folder)
    o, d, processes = cfg.optim, cfg.data, accelerator.num_processes
    if o.batch_size % (o.grad_acc * processes) or d.streams % processes or d.num_workers > d.streams // processes:
        raise UserError(
            f"{processes} processes: optim.batch_size={o.batch_size} has to be divisible by their number times "
            f"optim.grad_acc={o.grad_acc}, and data.streams={d.streams} by their number, which leaves each of them "
            f"with work for at most {d.streams // processes} of data.num_workers={d.num_workers}"
        )
    if parallelism(cfg) == "fsdp2" and "RANK" not in os.environ:
        raise UserError("parallel=fsdp2 is for several processes: start them with torchrun, as README says")
    if cfg.parallel == "ddp" and configured_parallelism() == "fsdp2":
        raise UserError("parallel=ddp, but accelerate was configured for FSDP: leave one of them out")
    # The mixed initialization starts at a loss above 100, where softmax gives denormal numbers: 4 times slower on a CPU
    torch.set_flush_denormal(True)
    # cuDNN's attention kernel, preferred on Hopper, gives no gradient to a bias
    torch.backends.cuda.enable_cudnn_sdp(False)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    return accelerator


def keep_freed_memory() -> None:
    """Where glibc manages memory, let it keep that of freed tensors for the next ones.

    It would give large ones back to the system, to get them again page by page: 7,000 pages and up to a twentieth of
    the time of nano's step.
    """
    if platform.libc_ver()[0] == "glibc":
        libc, trim_threshold, mmap_max = ctypes.CDLL(None), -1, -4  # numbers of mallopt's parameters in malloc.h
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)


def enter(cfg: DictConfig, folder: Path) -> tuple[TextIO, Path | None]:
    """(its config.yaml, locked for other runs as long as it is open; the checkpoint to go on from, if any)."""
    resume = cfg.checkpoint.resume
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "config.yaml").open("a+")
        # of this process alone, where flock's would live on in the data workers of one that was killed
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise log.taken(folder) from None
    except OSError as error:
        raise UserError(f"hydra.run.dir={folder} cannot be written ({error.strerror}): name another folder") from None
    if (resume == "never" or cfg.eval_only) and (folder / "metrics.jsonl").exists():
        raise log.taken(folder)
    begin = checkpoint.choose(folder, print)
    if not begin and (folder / "summary.json").exists():
        raise log.taken(folder)  # its checkpoints were removed
    if resume not in ("auto", "never") and not begin:
        begin = checkpoint.choose(Path(resume).expanduser(), print)
        if not begin:
            raise UserError(
                f"checkpoint.resume={resume} has no checkpoint: name a run's folder or its checkpoints/step-N"
            )
    elif resume not in ("auto", "never") and Path(resume).expanduser().resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"checkpoint.resume={resume} is of the run folder itself, which goes on from its newest checkpoint: "
            "leave it out, or name another hydra.run.dir"
        )
    return lock, begin


def choose_precision(cfg: DictConfig, device: torch.device) -> str:
    """fp32, or bf16 (autocast) where asked for or faster. fp16 is not offered: T5 diverges in it."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        fast = native
    else:
        # x86 has bf16 matrix products with AMX and with AVX-512 BF16; the latter alone measured half as fast as fp32
        fast = torch.cpu.get_capabilities().get("amx_bf16", False)
        native = fast or torch.cpu.get_capabilities().get("avx512_bf16", False)
    if cfg.precision == "bf16" and not native:
        raise UserError("precision=bf16, but this device does not compute in it: say precision=fp32 or auto")
    return cfg.precision if cfg.precision != "auto" else "bf16" if fast else "fp32"


def model_shape(cfg: DictConfig, tokenizer: data.Tokenizer) -> T5Config:
    shape = {name: cfg.model[name] for name in SHAPE}
    return model.t5_config(tokenizer.size, tokenizer.pad_id, tokenizer.eos_id, **shape)


def assemble(
    cfg: DictConfig, shape: T5Config, accelerator: Accelerator, done: int, begin: Path | None, steps: list[int] | None
) -> tuple[nn.Module, nn.Module, optim.Optimizer]:
    """(model, what trains it in all processes, optimizer) after `done` steps, read from the checkpoint `begin` if any.

    steps: of the optimizer's parameter groups; without them its state begins anew.
    """
    t5 = build_model(cfg, shape, accelerator, done, begin)
    trained = distributed(cfg, t5, accelerator)
    optimizer = optim.build(cfg.optim, t5)
    if begin and steps:
        checkpoint.load_optimizer(begin, steps, t5, optimizer)
    relora.set_floors(t5, optimizer)
    return t5, trained, optimizer


def build_model(
    cfg: DictConfig, shape: T5Config, accelerator: Accelerator, done: int = 0, begin: Path | None = None
) -> nn.Module:
    """The model on its device, with the weights of the checkpoint `begin`, or its first ones."""
    m = cfg.model
    t5 = model.CLASSES[m.klass](shape)
    if m.init == "small_embedding":
        model.add_embedding_norm(t5, shape)
    if relora.is_on(cfg.relora) and done > cfg.relora.warm_start_steps:
        relora.wrap(t5, cfg.relora, cfg.seed)
    if begin:
        checkpoint.load_weights(t5, "checkpoint.resume", begin)
    elif m.checkpoint_path:
        checkpoint.load_weights(t5, "model.checkpoint_path", Path(m.checkpoint_path).expanduser())
    else:
        distributions = model.initial_distributions(shape, m.init, m.init_std, m.init_distribution, m.std)
        model.initialize(t5, distributions, cfg.seed)
    if relora.begins(cfg.relora, done):
        relora.wrap(t5, cfg.relora, cfg.seed)
    if m.blind_encoder:
        model.blind(t5)
    compiled = compiling_pays(cfg, accelerator.device) if m.compile == "auto" else m.compile
    for block in [*t5.encoder.block, *t5.decoder.block]:
        if m.activation_checkpointing:
            block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
        if compiled:
            block.compile()  # not the whole model: the blocks of a stack share their code, however many they are
    return t5.to(accelerator.device)


def compiling_pays(cfg: DictConfig, device: torch.device) -> bool:
    """Whether the run is long enough: compiling takes about a minute at first and, on a CPU, a compiler."""
    if device.type == "cuda":
        return cfg.optim.total_steps >= 1000
    return cfg.optim.total_steps >= 5000 and shutil.which("c++") is not None


def distributed(cfg: DictConfig, t5: nn.Module, accelerator: Accelerator) -> nn.Module:
    """What to call for a forward pass whose gradients are averaged over all processes."""
    if parallelism(cfg) == "ddp":
        return accelerator.prepare_model(t5)
    # By hand, since Accelerate does it on a GPU only, and wants an optimizer at the same time
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    biases = [module for name, module in t5.named_modules() if name.endswith("relative_attention_bias")]
    for module in [*biases, *t5.encoder.block, *t5.decoder.block]:  # a bias is looked up before its block is called
        fully_shard(module, mesh=mesh)
    fully_shard(t5, mesh=mesh)
    return t5


def parallelism(cfg: DictConfig) -> str:
    return configured_parallelism() if cfg.parallel == "auto" else cfg.parallel


def configured_parallelism() -> str:
    """What `accelerate launch` was told, if it is what started this process."""
    return "fsdp2" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else "ddp"


def agree(accelerator: Accelerator, wish: bool) -> bool:
    """Whether any process has this wish."""
    if accelerator.num_processes == 1:
        return wish
    return accelerator.reduce(torch.tensor(float(wish), device=accelerator.device)).item() > 0


def header(
    cfg, folder, begin, accelerator, precision, text: data.Data, t5, progress: log.Progress, step_seconds: float
) -> dict:
    """What a person wants to see before waiting: a name and a text for each line."""
    device = accelerator.device
    processor = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    tokens = cfg.data.input_length + text.target_length
    processes = accelerator.num_processes
    together = f", {processes} processes with {parallelism(cfg)}" if processes > 1 else ""
    micro = cfg.optim.batch_size // cfg.optim.grad_acc // processes
    steps = cfg.optim.total_steps - progress.step
    return {
        "run": str(folder) + (f", on from {begin}" if begin else ""),
        "device": f"{device.type}, {processor}, {precision}{together}",
        "model": f"{sum(p.numel() for p in t5.parameters()):,} parameters",
        "corpus": "; ".join(corpus.headline for corpus in text.corpora),
        "tokenizer": f"{text.tokenizer.description}, sha256 {text.tokenizer.sha256[:16]}",
        "sequence": f"{text.raw_length} tokens of text -> {cfg.data.input_length} inputs, {text.target_length} targets",
        "held out": f"{text.held_out.counts['sequences']:,} sequences",
        "unigrams": f"{text.unigram_entropy:.2f} nats a target: the loss of knowing only how common each token is",
        "step": f"{cfg.optim.batch_size} sequences, micro batch {micro}, {cfg.optim.batch_size * tokens:,} tokens",
        "duration": f"about {log.duration(step_seconds * steps)} for {steps:,} steps",
    }


# ---------------------------------------------------------------------------------------------------------------------
# Ways in


@contextmanager
def stop_on_signal():
    """An event that Ctrl-C or SIGTERM sets, so that training stops between two steps; a second Ctrl-C stops at once."""
    stop = threading.Event()

    def request(number, frame):
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(overrides: list[str]) -> dict:
    """The same job from Python, any number of times: run(["optim.name=adamw"]) returns the summary."""
    return train(*config.load(overrides))


def main() -> None:
    """The command line."""
    try:
        command_line(sys.argv[1:])
    except (Exception, SystemExit):
        if os.environ.get("RANK", "0") != "0":
            time.sleep(5)  # most likely the main process ended first and said why; then the launcher ends this one now
        raise


def command_line(arguments: list[str]) -> None:
    """Errors of the user's end in one sentence, bugs in a traceback."""
    try:
        # --multirun, --help, --cfg job: Hydra's own ways in
        if any(argument.startswith("-") for argument in arguments):
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let it raise here
            hydra.main(version_base="1.3", config_path=str(config.FOLDER), config_name="config")(multirun_job)()
        elif run(arguments)["interrupted"]:
            sys.exit(130)
    except UserError as error:
        sys.exit(f"nanoT5: {error}")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.exit(f"nanoT5: {error}: make room, and the same command goes on from its newest checkpoint")
    except log.Diverged as error:
        print(f"nanoT5: {error}", file=sys.stderr)
        sys.exit(DIVERGED)
    except config.COMPLAINTS as error:  # about a multirun
        sys.exit(f"nanoT5: {config.explain(error)}")
    except KeyboardInterrupt:
        sys.exit(130)


def multirun_job(cfg: DictConfig) -> None:
    if train(cfg, Path(HydraConfig.get().runtime.output_dir))["interrupted"]:
        raise KeyboardInterrupt  # ends the whole multirun


if __name__ == "__main__":
    main()
