"""Pretrain a T5 by span corruption: python -m nanoT5.main [key=value ...]

The one file to read first. train() is the whole job: set up, build, loop over steps, finish. A run is a folder:

  config.yaml           the resolved config
  metrics.jsonl         one JSON object a log event, the only source of curves
  checkpoints/step-N/   weights, optimizer state and data state, to go on from (checkpoint.resume)
  model/                the trained model and its tokenizer, in Transformers' format
  curve.png, summary.json
"""

import itertools
import os
import platform
import signal
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import hydra
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from transformers import T5Config

from nanoT5 import UserError, checkpoint, config, curve, data, log, model, optim
from nanoT5.alignment import Alignment

Batch = dict[str, Tensor]
SHAPE = ("d_model", "d_kv", "num_heads", "d_ff", "num_layers", "num_decoder_layers", "dropout_rate")  # as in T5Config
DIVERGED = 3  # exit status, for whoever runs many: 0 is a finished run, 1 a mistake, 130 an interrupted run


def train(cfg: DictConfig, folder: Path) -> dict:
    """Run the job that cfg describes in a run folder; returns what summary.json holds."""
    started = time.perf_counter()
    config.check(cfg)
    make_run_folder(folder, cfg)
    accelerator = set_up(cfg)
    precision = choose_precision(cfg, accelerator.device)

    text = data.build(cfg)
    shape = model_shape(cfg, text.tokenizer)
    t5 = build_model(cfg, shape, accelerator)
    evaluator = Evaluator(t5, text.evaluation, text.tokenizer.sentinel_ids, precision, accelerator.device)
    if cfg.eval_only:
        return log.write_summary(folder, evaluator() | {"checkpoint": cfg.model.checkpoint_path, "interrupted": False})

    optimizer = optim.build(cfg.optim, t5)
    progress = log.Progress()
    if cfg.checkpoint.resume:
        checkpoint.load(Path(cfg.checkpoint.resume), t5, optimizer, progress)
        if cfg.model.blind_encoder:
            model.blind(t5)  # the checkpoint may be of a run that saw
    if progress.step >= cfg.optim.total_steps:
        raise UserError(f"checkpoint.resume is at step {progress.step} already: raise optim.total_steps")
    batches = text.batches(progress.data)
    schedule = optim.SCHEDULES[cfg.optim.lr_scheduler]
    step = Step(t5, optimizer, accelerator, precision, cfg.optim)

    first = next(batches)
    step_seconds = step.rehearse(first[0])
    evaluator.rehearse()
    batches = itertools.chain([first], batches)
    log.print_header(header(cfg, folder, accelerator, precision, text, t5, progress, step_seconds))
    events = log.Log(folder, cfg.optim.total_steps, progress, last_checkpoint=cfg.checkpoint.resume)

    events.write({"data/unigram_entropy": text.unigram_entropy})
    last = False
    with stop_on_signal() as stop:
        while not last:
            batch, progress.data = next(batches)
            lr = schedule(progress.step, optimizer.defaults["lr"], cfg.optim)
            loss, grad_l2 = step(batch, lr, seed=(cfg.seed << 32) + progress.step)
            progress.advance(batch)
            events.add(lr, loss, grad_l2)

            last = progress.step == cfg.optim.total_steps or stop.is_set()
            evaluate = last or progress.step % cfg.eval.every_steps == 0
            save = last or progress.step % cfg.checkpoint.every_steps == 0
            if evaluate or save or progress.step % cfg.logging.every_steps == 0:
                events.training(t5, optimizer)  # before a checkpoint, so that no diverged weights are ever saved
            if evaluate:
                events.evaluation(evaluator())
            if save:
                events.last_checkpoint = checkpoint.save(folder / "checkpoints", t5, optimizer, progress)

    events.close()
    checkpoint.export(folder / "model", t5, shape, text.tokenizer)
    curve.draw([folder], folder / "curve.png")
    facts = {
        "curve": curve.shapes(curve.read(folder)),
        "interrupted": progress.step < cfg.optim.total_steps,
        "seconds": round(time.perf_counter() - started, 1),
        "parameters": sum(p.numel() for p in t5.parameters()),
        "device": accelerator.device.type,
        "precision": precision,
        "corpus": text.corpus.description,
        "tokenizer": {"description": text.tokenizer.description, "sha256": text.tokenizer.sha256},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    counts = {name: value for name, value in asdict(progress).items() if name != "data"}
    return log.write_summary(folder, events.last_evaluation | counts | facts)


# ---------------------------------------------------------------------------------------------------------------------
# Setting up


def make_run_folder(folder: Path, cfg: DictConfig) -> None:
    if (folder / "metrics.jsonl").exists():
        raise log.taken(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    except OSError as error:
        raise UserError(f"hydra.run.dir={folder} cannot be written ({error.strerror}): name another folder") from None


def set_up(cfg: DictConfig) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)  # a notebook may run on another device than before
    gpu = torch.cuda.is_available()
    if cfg.device == "gpu" and not gpu:
        raise UserError(
            "device=gpu, but torch finds no CUDA GPU: say device=cpu, or install a torch build for your GPU"
        )
    accelerator = Accelerator(cpu=cfg.device == "cpu" or not gpu)
    if accelerator.num_processes > 1:
        raise UserError("several processes are not supported yet: start one, which uses one GPU")
    # The mixed initialization starts at a loss above 100, where softmax gives denormal numbers: 4 times slower on a CPU
    torch.set_flush_denormal(True)
    # cuDNN's attention kernel, preferred on Hopper, gives no gradient to a bias
    torch.backends.cuda.enable_cudnn_sdp(False)
    return accelerator


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


def build_model(cfg: DictConfig, shape: T5Config, accelerator: Accelerator) -> nn.Module:
    """The model with its first weights, on its device."""
    m = cfg.model
    t5 = model.CLASSES[m.klass](shape)
    if m.init == "small_embedding":
        model.add_embedding_norm(t5, shape)
    if m.checkpoint_path:
        checkpoint.load_weights(t5, "model.checkpoint_path", Path(m.checkpoint_path))
    else:
        distributions = model.initial_distributions(shape, m.init, m.init_std, m.init_distribution, m.std)
        model.initialize(t5, distributions, cfg.seed)
    if m.blind_encoder:
        model.blind(t5)
    # Compiling took 80 s for nano on two CPU cores and won nothing there; on a GPU a long run repays it
    pays = accelerator.device.type == "cuda" and cfg.optim.total_steps >= 1000
    if pays if m.compile == "auto" else m.compile:
        t5.compile()
    return accelerator.prepare_model(t5)


def header(
    cfg, folder, accelerator, precision, text: data.Data, t5, progress: log.Progress, step_seconds: float
) -> dict:
    """What a person wants to see before waiting: a name and a text for each line."""
    device = accelerator.device
    processor = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    tokens = cfg.data.input_length + text.target_length
    micro = cfg.optim.batch_size // cfg.optim.grad_acc
    steps = cfg.optim.total_steps - progress.step
    return {
        "run": str(folder),
        "device": f"{device.type}, {processor}, {precision}",
        "model": f"{sum(p.numel() for p in t5.parameters()):,} parameters",
        "corpus": text.corpus.headline,
        "tokenizer": f"{text.tokenizer.description}, sha256 {text.tokenizer.sha256[:16]}",
        "sequence": f"{text.raw_length} tokens of text -> {cfg.data.input_length} inputs, {text.target_length} targets",
        "unigrams": f"{text.unigram_entropy:.2f} nats a target: the loss of knowing only how common each token is",
        "step": f"{cfg.optim.batch_size} sequences, micro batch {micro}, {cfg.optim.batch_size * tokens:,} tokens",
        "duration": f"about {log.duration(step_seconds * steps)} for {steps:,} steps",
    }


def autocast(precision: str, device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


# ---------------------------------------------------------------------------------------------------------------------
# A step, an evaluation


@dataclass
class Step:
    """One optimizer step on a global batch, in micro batches. Nothing here reads a number from the device."""

    t5: nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    precision: str
    cfg: DictConfig  # the config's group optim

    def __call__(self, batch: Batch, lr: float, seed: int) -> tuple[Tensor, Tensor]:
        """(mean loss in nats per target token, L2 norm of the gradient before clipping), on the device."""
        torch.manual_seed(seed)  # of dropout: a step draws the same in a run that was resumed
        if self.optimizer.curvature_is_due():
            self.gradients(batch, sampled=True)
            self.optimizer.update_curvature((batch["labels"] != model.IGNORED).sum().item())
            self.optimizer.zero_grad()
        loss = self.gradients(batch)
        limit = self.cfg.grad_clip or float("inf")
        grad_l2 = self.accelerator.clip_grad_norm_(self.t5.parameters(), limit)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, grad_l2

    def gradients(self, batch: Batch, sampled: bool = False) -> Tensor:
        """Accumulate the gradient of the batch's mean loss per target token; returns that loss.

        sampled: of the loss against labels drawn from the model's own predictions at each target token.
        """
        self.t5.train()
        targets = (batch["labels"] != model.IGNORED).sum()
        total = torch.zeros((), device=self.accelerator.device)
        micros = range(self.cfg.grad_acc)
        for i, *columns in zip(micros, *(column.chunk(self.cfg.grad_acc) for column in batch.values())):
            micro = dict(zip(batch, columns))
            share = (micro["labels"] != model.IGNORED).sum() / targets
            micro = {name: column.to(self.accelerator.device, non_blocking=True) for name, column in micro.items()}
            with self.accelerator.no_sync(self.t5) if i < micros[-1] else nullcontext():
                with autocast(self.precision, self.accelerator.device):
                    output = self.t5(**micro)
                    loss = sampled_loss(output.logits, micro["labels"]) if sampled else output.loss
                    loss = loss * share.item()
                self.accelerator.backward(loss)
            total += loss.detach()
        return total

    def rehearse(self, batch: Batch) -> float:
        """Seconds that a step will take, from gradients that are thrown away; what cannot run fails here."""
        for _ in range(2):  # the first time warms up, and compiles
            started = time.perf_counter()
            self.gradients(batch).item()
            self.optimizer.zero_grad()
        return time.perf_counter() - started


def sampled_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy against labels drawn from the logits, over the places where labels are not IGNORED.

    Its gradient, squared, is Sophia's Gauss-Newton-Bartlett estimate: Liu et al. 2023, arXiv:2305.14342, algorithm 2.
    """
    logits = logits.float().flatten(0, 1)
    drawn = torch.multinomial(logits.detach().softmax(-1), 1).flatten()
    drawn = drawn.masked_fill(labels.flatten() == model.IGNORED, model.IGNORED)
    return F.cross_entropy(logits, drawn, ignore_index=model.IGNORED)


@dataclass
class Evaluator:
    """Loss in nats per target token, accuracy and cross-attention's alignment on the held-out batches."""

    t5: nn.Module
    batches: list[Batch]
    sentinel_ids: np.ndarray
    precision: str
    device: torch.device

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # compiled code would not call the hooks that watch attention
    def __call__(self) -> dict:
        self.t5.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, correct targets, targets
        with Alignment(self.t5, torch.as_tensor(self.sentinel_ids, device=self.device)) as alignment:
            for batch in self.batches:
                batch = {name: column.to(self.device, non_blocking=True) for name, column in batch.items()}
                with autocast(self.precision, self.device):
                    output = self.t5(**batch)
                labels = batch["labels"]
                valid = labels != model.IGNORED
                correct = (output.logits.argmax(-1) == labels) & valid
                sums += torch.stack([output.loss * valid.sum(), correct.sum(), valid.sum()])
                alignment.add(**batch)
        loss, correct, targets = sums.tolist()
        return {"eval/loss": loss / targets, "eval/accuracy": correct / targets} | alignment.result()

    def rehearse(self) -> None:
        """Evaluate one batch, so that evaluation cannot fail after a day of training."""
        replace(self, batches=self.batches[:1])()


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
    """The command line. Errors of the user's end in one sentence, bugs in a traceback."""
    arguments = sys.argv[1:]
    try:
        # --multirun, --help, --cfg job: Hydra's own ways in
        if any(argument.startswith("-") for argument in arguments):
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let it raise here
            hydra.main(version_base="1.3", config_path=str(config.FOLDER), config_name="config")(multirun_job)()
        elif run(arguments)["interrupted"]:
            sys.exit(130)
    except UserError as error:
        sys.exit(f"nanoT5: {error}")
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
