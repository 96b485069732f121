"""Pretrain a T5 by span corruption: python -m nanoT5.main [key=value ...]

The one file to read first. train() is the whole job: set up, build, loop over steps, finish. A run is a folder:

  config.yaml           the resolved config
  metrics.jsonl         one JSON object a log event, the only source of curves
  checkpoints/step-N/   weights, optimizer state and data state, to go on from (checkpoint.resume)
  model/                the trained model and its tokenizer, in Transformers' format
  curve.png, summary.json
"""

import itertools
import json
import os
import platform
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import hydra
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from tqdm import tqdm

from nanoT5 import UserError, config, curve, data, model, optim

Batch = dict[str, Tensor]


def train(cfg: DictConfig, folder: Path) -> dict:
    """Run the job that cfg describes in a run folder; returns what summary.json holds."""
    started = time.perf_counter()
    config.check(cfg)
    make_run_folder(folder, cfg)
    accelerator = set_up(cfg)
    precision = choose_precision(cfg, accelerator.device)

    text = data.build(cfg)
    t5, shape = build_model(cfg, text, accelerator)
    evaluator = Evaluator(t5, text.evaluation, precision, accelerator.device)
    if cfg.eval_only:
        return write_summary(folder, evaluator() | {"checkpoint": cfg.model.checkpoint_path})

    optimizer = optim.build(cfg.optim, t5)
    base_lr = optimizer.defaults["lr"]
    schedule = optim.SCHEDULES[cfg.optim.lr_scheduler]
    progress = Progress()
    if cfg.checkpoint.resume:
        load_checkpoint(Path(cfg.checkpoint.resume), t5, optimizer, progress)
    batches = text.batches(progress.data)
    stepper = Stepper(t5, optimizer, accelerator, precision, cfg.optim)

    first = next(batches)
    step_seconds = stepper.rehearse(first[0])
    evaluator.rehearse()
    print_header(cfg, folder, accelerator.device, precision, text, t5, step_seconds)
    batches = itertools.chain([first], batches)
    log = Log(folder, cfg.optim.total_steps, progress)

    with stop_on_signal() as stop:
        while progress.step < cfg.optim.total_steps and not stop.is_set():
            batch, progress.data = next(batches)
            lr = schedule(progress.step, base_lr, cfg.optim)
            loss, grad_l2 = stepper(batch, lr, seed=cfg.seed + progress.step)
            progress.advance(batch)
            log.add(loss, grad_l2)

            last = progress.step == cfg.optim.total_steps or stop.is_set()
            evaluate = last or progress.step % cfg.eval.every_steps == 0
            save = last or progress.step % cfg.checkpoint.every_steps == 0
            if evaluate or save or progress.step % cfg.logging.every_steps == 0:
                log.training(lr, t5)  # before a checkpoint, so that no diverged weights are ever saved
            if evaluate:
                log.evaluation(evaluator())
            if save:
                save_checkpoint(folder / "checkpoints", t5, optimizer, progress)
    log.bar.close()

    export(folder / "model", t5, shape, text.tokenizer)
    curve.draw([folder], folder / "curve.png")
    return write_summary(
        folder,
        log.last_evaluation
        | asdict(progress)
        | {
            "interrupted": progress.step < cfg.optim.total_steps,
            "seconds": round(time.perf_counter() - started, 1),
            "parameters": sum(p.numel() for p in t5.parameters()),
            "device": accelerator.device.type,
            "precision": precision,
            "corpus": text.corpus.description,
            "tokenizer": {"description": text.tokenizer.description, "sha256": text.tokenizer.sha256},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        },
    )


# ---------------------------------------------------------------------------------------------------------------------
# Setting up


def make_run_folder(folder: Path, cfg: DictConfig) -> None:
    if (folder / "metrics.jsonl").exists():
        raise UserError(f"hydra.run.dir={folder} already holds a run: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    except OSError as error:
        raise UserError(f"hydra.run.dir={folder} cannot be written ({error.strerror}): name another folder") from None


def set_up(cfg: DictConfig) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)  # a notebook may run on another device than before
    accelerator = Accelerator(cpu=cfg.device == "cpu")
    if cfg.device == "gpu" and accelerator.device.type == "cpu":
        raise UserError("device=gpu, but torch finds no GPU: say device=cpu, or install a torch build for your GPU")
    if accelerator.device.type == "cpu":
        # The mixed initialization starts at a loss above 100, where softmax gives denormal numbers: 4 times slower
        torch.set_flush_denormal(True)
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


def build_model(cfg: DictConfig, text: data.Data, accelerator: Accelerator):
    """(the model on its device, its T5Config)."""
    names = ("d_model", "d_kv", "num_heads", "d_ff", "num_layers", "num_decoder_layers", "dropout_rate")
    shape = model.t5_config(
        text.tokenizer.size, text.tokenizer.pad_id, text.tokenizer.eos_id, **{name: cfg.model[name] for name in names}
    )
    t5 = model.CLASSES[cfg.model.klass](shape)
    if cfg.model.checkpoint_path:
        load_weights(t5, Path(cfg.model.checkpoint_path))
    else:
        model.initialize(t5, shape, cfg.seed)
    # Compiling took 80 s for nano on two CPU cores and won nothing there; on a GPU a long run repays it
    auto = accelerator.device.type == "cuda" and cfg.optim.total_steps >= 1000
    if auto if cfg.model.compile == "auto" else cfg.model.compile:
        t5.compile()
    return accelerator.prepare_model(t5), shape


def autocast(precision: str, device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


# ---------------------------------------------------------------------------------------------------------------------
# A step, an evaluation


@dataclass
class Stepper:
    """One optimizer step on a global batch, in micro batches. Nothing here waits for the device."""

    t5: nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    precision: str
    cfg: DictConfig  # the config's group optim

    def __call__(self, batch: Batch, lr: float, seed: int) -> tuple[Tensor, Tensor]:
        """(mean loss in nats per target token, L2 norm of the gradient before clipping), on the device."""
        torch.manual_seed(seed)  # of dropout: a step draws the same in a run that was resumed
        loss = self.gradients(batch)
        limit = self.cfg.grad_clip or float("inf")
        grad_l2 = self.accelerator.clip_grad_norm_(self.t5.parameters(), limit)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, grad_l2

    def gradients(self, batch: Batch) -> Tensor:
        """Accumulate the gradient of the batch's mean loss per target token; returns that loss."""
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
                    loss = self.t5(**micro).loss * share.item()
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


@dataclass
class Evaluator:
    """Negative log-likelihood in nats per target token and accuracy over the held-out batches."""

    t5: nn.Module
    batches: list[Batch]
    precision: str
    device: torch.device

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        self.t5.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, correct targets, targets
        for batch in self.batches:
            batch = {name: column.to(self.device, non_blocking=True) for name, column in batch.items()}
            with autocast(self.precision, self.device):
                output = self.t5(**batch)
            labels = batch["labels"]
            valid = labels != model.IGNORED
            correct = (output.logits.argmax(-1) == labels) & valid
            sums += torch.stack([output.loss * valid.sum(), correct.sum(), valid.sum()])
        loss, correct, targets = sums.tolist()
        return {"eval/loss": loss / targets, "eval/accuracy": correct / targets}

    def rehearse(self) -> None:
        """Evaluate one batch, so that evaluation cannot fail after a day of training."""
        Evaluator(self.t5, self.batches[:1], self.precision, self.device)()


# ---------------------------------------------------------------------------------------------------------------------
# What a run reports


@dataclass
class Progress:
    """How far a run has come: all that a checkpoint holds beside weights and optimizer state."""

    step: int = 0
    input_tokens: int = 0
    target_tokens: int = 0
    data: dict | None = None  # state of the data after the last batch; None at the start

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.target_tokens

    def advance(self, batch: Batch) -> None:
        self.step += 1
        self.input_tokens += batch["input_ids"].numel()
        self.target_tokens += batch["labels"].numel()


class Diverged(Exception):
    """The loss or the gradient is no longer a number."""


@dataclass
class Log:
    """Log events to metrics.jsonl and to the terminal: a progress bar there, a line each event elsewhere."""

    folder: Path
    total_steps: int
    progress: Progress
    pending: list[Tensor] = field(default_factory=list)  # (loss, gradient norm) of each step since the last event
    last_evaluation: dict = field(default_factory=dict)

    def __post_init__(self):
        on_terminal = sys.stderr.isatty()
        self.bar = tqdm(total=self.total_steps, initial=self.progress.step, unit="step", disable=not on_terminal)
        self.resumed_at, self.started = self.progress.step, time.perf_counter()
        self.tokens, self.since = self.progress.tokens, self.started  # at the last event

    def add(self, loss: Tensor, grad_l2: Tensor) -> None:
        self.pending.append(torch.stack([loss, grad_l2]))
        self.bar.update()

    def training(self, lr: float, t5: nn.Module) -> None:
        """The event of the steps since the last one; the one place where training waits for the device."""
        losses, norms = torch.stack(self.pending).double().cpu().unbind(1)
        finite = losses.isfinite() & norms.isfinite()
        if not finite.all():
            step = self.progress.step - len(losses) + 1 + finite.int().argmin().item()
            saved = newest_checkpoint(self.folder)
            raise Diverged(
                f"the loss or its gradient became infinite or NaN at step {step}, learning rate {lr:.2e}: lower "
                f"optim.base_lr; the last good checkpoint is {saved or 'the start, none was saved yet'}"
            )
        now = time.perf_counter()
        event = {
            "train/loss": losses.mean().item(),
            "train/lr": lr,
            "train/grad_l2": norms.mean().item(),
            "train/weights_l2": torch.stack(torch._foreach_norm([p.detach() for p in t5.parameters()])).norm().item(),
            "train/tokens_per_second": (self.progress.tokens - self.tokens) / (now - self.since),
            "train/input_tokens": self.progress.input_tokens,
            "train/target_tokens": self.progress.target_tokens,
        }
        self.write(event)
        shown = f"loss {event['train/loss']:.3f} | lr {lr:.1e} | grad {event['train/grad_l2']:.2f}"
        shown += f" | {event['train/tokens_per_second']:,.0f} tokens/s"
        seconds_left = (now - self.started) / (self.progress.step - self.resumed_at)
        seconds_left *= self.total_steps - self.progress.step
        if self.bar.disable:
            self.say(f"{shown} | {duration(seconds_left)} left")
        self.bar.set_postfix_str(shown)
        self.pending.clear()
        self.tokens, self.since = self.progress.tokens, now

    def evaluation(self, event: dict) -> None:
        self.last_evaluation = event
        self.write(event)
        self.say(f"held-out loss {event['eval/loss']:.3f}, accuracy {event['eval/accuracy']:.3f}")
        self.since = time.perf_counter()  # tokens/s is that of training

    def write(self, event: dict) -> None:
        with (self.folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": self.progress.step} | event) + "\n")

    def say(self, text: str) -> None:
        tqdm.write(f"step {self.progress.step:,}/{self.total_steps:,} | {text}")
        sys.stdout.flush()


def duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def print_header(cfg, folder, device, precision, text: data.Data, t5, step_seconds: float) -> None:
    corpus = text.corpus.description
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    rows = {
        "run": folder,
        "device": f"{device.type}, {where}, {precision}",
        "model": f"{sum(p.numel() for p in t5.parameters()):,} parameters",
        "corpus": ", ".join(f"{key} {value}" for key, value in corpus.items() if key != "versions"),
        "versions": ", ".join(f"{name} {version}" for name, version in corpus.get("versions", {}).items()),
        "tokenizer": f"{text.tokenizer.description}, sha256 {text.tokenizer.sha256[:16]}",
        "sequence": f"{text.raw_length} tokens of text -> {cfg.data.input_length} inputs, {text.target_length} targets",
        "step": f"{cfg.optim.batch_size} sequences in {cfg.optim.grad_acc} micro batches of "
        f"{cfg.optim.batch_size // cfg.optim.grad_acc}, "
        f"{cfg.optim.batch_size * (cfg.data.input_length + text.target_length):,} tokens",
        "duration": f"about {duration(step_seconds * cfg.optim.total_steps)} for {cfg.optim.total_steps:,} steps",
    }
    for key, value in rows.items():
        if value:
            print(f"{key:<10}{value}")
    sys.stdout.flush()


def write_summary(folder: Path, summary: dict) -> dict:
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"held-out loss {summary['eval/loss']:.4f}, accuracy {summary['eval/accuracy']:.4f}: {folder / 'summary.json'}")
    return summary


# ---------------------------------------------------------------------------------------------------------------------
# Weights, checkpoints, export


def weights(t5: nn.Module) -> dict[str, Tensor]:
    """The state dict without the embedding's two other names."""
    return {name: tensor.contiguous() for name, tensor in t5.state_dict().items() if "embed_tokens" not in name}


def load_weights(t5: nn.Module, path: Path) -> None:
    """From a checkpoint or exported model folder, or from a .safetensors file."""
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        loaded = safetensors.torch.load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{file} cannot be read as weights ({error}): name a checkpoint, a model folder or a .safetensors") from None
    expected = weights(t5)
    for name in sorted(expected.keys() | loaded.keys()):
        there, here = (list(w[name].shape) if name in w else "absent" for w in (loaded, expected))
        if there != here and "embed_tokens" not in name:
            raise UserError(f"{file} does not fit the model: {name} is {there} there, {here} here; see model and data.tokenizer")
    t5.load_state_dict(loaded, strict=False)


def save_checkpoint(folder: Path, t5: nn.Module, optimizer: optim.Optimizer, progress: Progress) -> None:
    """Written aside and then moved, so that a folder called step-N is always whole."""
    final = folder / f"step-{progress.step}"
    aside = folder / f".writing-{progress.step}"
    aside.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(weights(t5), aside / "model.safetensors")
    safetensors.torch.save_file(optimizer_tensors(t5, optimizer), aside / "optimizer.safetensors")
    state = asdict(progress) | {"optimizer_steps": [group["steps"] for group in optimizer.param_groups]}
    (aside / "state.json").write_text(json.dumps(state))
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)


def optimizer_tensors(t5: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": tensor
        for name, parameter in t5.named_parameters()
        for key, tensor in optimizer.state[parameter].items()
    }


def load_checkpoint(path: Path, t5: nn.Module, optimizer: optim.Optimizer, progress: Progress) -> None:
    load_weights(t5, path)
    state = json.loads((path / "state.json").read_text())
    for group, steps in zip(optimizer.param_groups, state.pop("optimizer_steps")):
        group["steps"] = steps
    parameters = dict(t5.named_parameters())
    for name, tensor in safetensors.torch.load_file(path / "optimizer.safetensors").items():
        parameter, key = name.split("/")
        optimizer.state[parameters[parameter]][key] = tensor.to(parameters[parameter].device)
    for key, value in state.items():
        setattr(progress, key, value)


def newest_checkpoint(folder: Path) -> Path | None:
    steps = [int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")]
    return folder / "checkpoints" / f"step-{max(steps)}" if steps else None


def export(folder: Path, t5: nn.Module, shape, tokenizer) -> None:
    """The trained model as transformers.AutoModelForSeq2SeqLM loads it, and its tokenizer as AutoTokenizer does."""
    from transformers import GenerationConfig

    shape.architectures = ["T5ForConditionalGeneration"]
    shape.tie_word_embeddings = False  # Transformers 5 sets it to True whatever one asks for
    shape.save_pretrained(folder)
    GenerationConfig.from_model_config(shape).save_pretrained(folder)
    safetensors.torch.save_file(weights(t5), folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(folder)


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
    """The same job from Python: run(["optim.name=adamw"]) returns the summary. Works any number of times in a process."""
    try:
        cfg, folder = config.load(overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(config.explain(error)) from None
    return train(cfg, folder)


def main() -> None:
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let Hydra raise, so that its complaints become sentences here
    job = hydra.main(version_base="1.3", config_path=str(config.FOLDER), config_name="config")(command_line_job)
    try:
        job()
    except (UserError, Diverged) as error:
        sys.exit(f"nanoT5: {error}")
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"nanoT5: {config.explain(error)}")
    except KeyboardInterrupt:
        sys.exit(130)


def command_line_job(cfg: DictConfig) -> None:
    if train(cfg, Path(HydraConfig.get().runtime.output_dir)).get("interrupted"):
        raise KeyboardInterrupt  # ends a multirun too


if __name__ == "__main__":
    main()
