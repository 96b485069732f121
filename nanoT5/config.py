"""The configuration: composing it, checking it. Keys, defaults and their meaning are in configs/."""

import difflib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from nanoT5 import UserError, corruption, data, model, optim, relora, trackers

FOLDER = Path(__file__).parent.parent / "configs"

COMPLAINTS = (HydraException, OmegaConfBaseException)  # what these libraries raise about a command line

Rule = tuple[str, Callable[[object], bool]]  # what a value has to be, in words and as a test


def choice(*values) -> Rule:
    # with its type, since True == 1 in Python
    return "one of " + ", ".join(str(v) for v in values), lambda v: any(type(v) is type(w) and v == w for w in values)


def whole(least: int, most: int = 2**63 - 1) -> Rule:
    words = f"a whole number from {least} " + ("up" if most == 2**63 - 1 else f"to {most}")
    return words, lambda v: type(v) is int and least <= v <= most


def number(words: str, test: Callable[[float], bool]) -> Rule:
    return words, lambda v: type(v) in (int, float) and test(v)


def or_null(rule: Rule) -> Rule:
    return f"{rule[0]}, or null", lambda v: v is None or rule[1](v)


TEXT: Rule = ("a text, one that looks like a number in quotes: \"'42'\"", lambda v: isinstance(v, str) and v != "")
SWITCH = choice(True, False)
POSITIVE = number("a number above 0", lambda v: 0 < v < float("inf"))
NOT_NEGATIVE = number("a number from 0 up", lambda v: 0 <= v < float("inf"))
SHARE = number("a number between 0 and 1", lambda v: 0 < v < 1)

RULES: dict[str, Rule] = {
    "seed": whole(0, 2**31 - 1),
    "device": choice("auto", "cpu", "gpu"),
    "precision": choice("auto", "bf16", "fp32"),
    "parallel": choice("auto", "ddp", "fsdp2"),
    "eval_only": SWITCH,
    "dryrun": SWITCH,
    "max_hours": or_null(POSITIVE),
    "tag": TEXT,
    "model.klass": choice(*model.CLASSES),
    "model.dropout_rate": number("a number from 0 to below 1", lambda v: 0 <= v < 1),
    "model.random_init": SWITCH,
    "model.checkpoint_path": or_null(TEXT),
    "model.compile": choice("auto", True, False),
    "model.activation_checkpointing": SWITCH,
    "model.init": choice(*model.INITIALIZATIONS),
    "model.init_distribution": choice("normal", "uniform"),
    "model.blind_encoder": SWITCH,
    "model.d_model": whole(1),
    "model.d_kv": whole(1),
    "model.num_heads": whole(1),
    "model.d_ff": whole(1),
    "model.num_layers": whole(1),
    "model.num_decoder_layers": whole(1),
    "model.init_std": POSITIVE,
    **{f"model.std.{kind}": or_null(POSITIVE) for kind in model.HF},
    "data.source": choice(*data.SOURCES, "mixture"),
    "data.path": or_null(TEXT),
    "data.name": or_null(TEXT),
    "data.config": or_null(TEXT),
    "data.text_column": TEXT,
    "data.txt_document": choice("paragraph", "file"),
    "data.mixture": or_null(("a list of sources", lambda v: isinstance(v, list) and v != [])),
    "data.on_error": choice("skip", "raise"),
    "data.tokenizer": or_null(TEXT),
    "data.vocab_size": whole(16),
    "data.input_length": whole(2),
    "data.mlm_probability": SHARE,
    "data.mean_noise_span_length": number("a number from 1 up", lambda v: 1 <= v < float("inf")),
    "data.held_out": SHARE,
    "data.streams": whole(1),
    "data.shuffle_block": whole(1),
    "data.num_workers": whole(0),
    "data.cache": TEXT,
    "optim.name": choice(*optim.OPTIMIZERS),
    "optim.rms_scale": or_null(choice(True, False, "init")),
    "optim.base_lr": or_null(POSITIVE),
    "optim.batch_size": whole(1),
    "optim.total_steps": whole(1),
    "optim.warmup_steps": whole(0),
    "optim.lr_scheduler": choice(*optim.SCHEDULES),
    "optim.final_cosine": NOT_NEGATIVE,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.grad_clip": NOT_NEGATIVE,
    "optim.grad_acc": whole(1),
    "optim.max_bad_steps": whole(1),
    "relora.rank": or_null(whole(1)),
    "relora.alpha": or_null(POSITIVE),
    "relora.dropout": number("a number from 0 to below 1", lambda v: 0 <= v < 1),
    "relora.every": whole(1),
    "relora.warm_start_steps": whole(0),
    "relora.restart_warmup_steps": whole(0),
    "relora.reset_optimizer": choice("none", "zero", "magnitude", "random"),
    "relora.reset_ratio": number("a number from 0 to 1", lambda v: 0 <= v <= 1),
    "relora.init": choice("kaiming", "identity"),
    "relora.modules": TEXT,
    "eval.every_steps": whole(1),
    "eval.steps": whole(1),
    "eval.batch_size": whole(1),
    "checkpoint.every_steps": whole(1),
    "checkpoint.keep": or_null(whole(1)),
    "checkpoint.resume": TEXT,
    "checkpoint.force": SWITCH,
    "logging.every_steps": whole(1),
    "logging.trackers": (
        f"a list of {', '.join(trackers.NAMES)}",
        lambda v: isinstance(v, list) and all(name in trackers.NAMES for name in v),
    ),
}


def flat(cfg) -> dict[str, Any]:
    """Every key of a config with its value: {"optim.batch_size": 32, ...}."""
    values = {}
    for key, value in cfg.items():
        if isinstance(value, DictConfig):
            values |= {f"{key}.{inner}": v for inner, v in flat(value).items()}
        else:
            values[key] = OmegaConf.to_container(value) if isinstance(value, ListConfig) else value
    return values


# Keys in which a checkpoint and the run that goes on from it may differ; of the others, those that decide what is
# trained, and on what, may not
FREE: tuple[str, ...] = ("device", "parallel", "tag", "dryrun", "max_hours", "eval.", "checkpoint.", "logging.")
FREE += ("optim.total_steps", "optim.max_bad_steps", "data.num_workers", "data.cache", "model.compile")
FREE += ("model.activation_checkpointing", "model.checkpoint_path", "model.random_init")
DECIDING = ("seed", "model.", "data.", "optim.name", "optim.rms_scale", "relora.")


def is_free(key: str) -> bool:
    return key.startswith(FREE)


def decides(key: str) -> bool:
    return key.startswith(DECIDING) and not is_free(key)


def check(cfg: DictConfig) -> None:
    """Refuse a config that cannot be run, before anything is built, with a sentence for everything that is wrong."""
    values = flat(cfg)
    faults = [f"{key} is missing: give it a value" for key in RULES if key not in values]
    for key, value in values.items():
        if key not in RULES:
            faults.append(unknown(key))
        elif not RULES[key][1](value):
            faults.append(f"{key}={'null' if value is None else value}: it has to be {RULES[key][0]}")
    if not faults:
        faults = list(contradictions(cfg))
    if faults:
        raise UserError("\n".join(faults))


def contradictions(cfg: DictConfig) -> Iterator[str]:
    """What is wrong with keys that are each right."""
    o = cfg.optim
    yield from misplaced(cfg.data, "data.")
    if (cfg.data.source == "mixture") != (cfg.data.mixture is not None):
        yield f"data.mixture and data=mixture need each other: data.mixture='[{PART_EXAMPLE},...]'"
    for i, part in enumerate(flat(cfg.data)["mixture"] or []):
        yield from faults_of_part(part, f"data.mixture[{i}]")
    if o.batch_size % o.grad_acc:
        yield f"optim.batch_size={o.batch_size} is not divisible by optim.grad_acc={o.grad_acc}: change one of them"
    if o.warmup_steps >= o.total_steps and "cosine" in o.lr_scheduler:
        yield f"optim.warmup_steps={o.warmup_steps} leaves no step of optim.total_steps={o.total_steps} for the cosine"
    if cfg.data.num_workers > cfg.data.streams:
        yield f"data.num_workers={cfg.data.num_workers}: at most data.streams={cfg.data.streams} of them have work"
    yield from faults_of_adapters(cfg)
    try:
        corruption.span_lengths(cfg.data.input_length, cfg.data.mlm_probability, cfg.data.mean_noise_span_length)
    except ValueError as error:
        yield f"data.input_length, data.mlm_probability and data.mean_noise_span_length do not go together: {error}"
    needs_weights = cfg.eval_only or not cfg.model.random_init
    if needs_weights and cfg.model.checkpoint_path is None:
        yield "model.checkpoint_path is needed with eval_only=true or model.random_init=false: name a checkpoint"
    if cfg.model.checkpoint_path is not None and not needs_weights:
        yield "model.checkpoint_path is not used while model.random_init=true: say model.random_init=false"
    if cfg.eval_only and cfg.checkpoint.resume not in ("auto", "never"):
        yield "checkpoint.resume has no part in eval_only=true, which measures model.checkpoint_path: leave it out"
    if needs_weights and (cfg.model.init in ("t5", "uniform") or any(cfg.model.std.values())):
        yield "model.init and model.std have no part in weights from model.checkpoint_path: leave them out"


def faults_of_adapters(cfg: DictConfig) -> Iterator[str]:
    r, m = cfg.relora, cfg.model
    if r.init == "identity" and (r.rank is not None or r.alpha is not None):
        yield "relora.rank and relora.alpha have no part in relora.init=identity: leave them out"
    if not relora.is_on(r):
        if cfg.optim.lr_scheduler == "jagged_cosine":
            yield "optim.lr_scheduler=jagged_cosine follows the restarts of adapters: give relora.rank"
        return
    smallest = min(m.d_model, m.num_heads * m.d_kv, m.d_ff)
    if r.rank is not None and r.rank > smallest:
        yield f"relora.rank={r.rank} is above the rank of the smallest matrix: give {smallest} at most"
    if r.warm_start_steps >= cfg.optim.total_steps:
        yield f"relora.warm_start_steps={r.warm_start_steps} leaves no step of optim.total_steps for the adapters"
    if r.restart_warmup_steps >= r.every:
        yield f"relora.restart_warmup_steps={r.restart_warmup_steps} has to be below relora.every={r.every}"
    if m.blind_encoder:
        yield "model.blind_encoder=true and adapters do not go together: leave relora.rank out"
    try:
        re.compile(r.modules)
    except re.error as error:
        yield f"relora.modules={r.modules} is not a regular expression: {error}"


NEEDED: dict[
    str, dict[str, str | None]
] = {  # keys of data that only some sources take, and what to name there where it is needed
    "path": {"text": "a .txt, .jsonl or .parquet file, a folder or a quoted glob", "saved": "a folder"},
    "name": {"hub": "a data set on the Hub"},
    "config": {"hub": None},
}


PART_EXAMPLE = "{source:text,path:a.txt,weight:2}"


def faults_of_part(part: object, where: str) -> Iterator[str]:
    """What is wrong with a source of a mixture."""
    rules = {key: RULES[f"data.{key}"] for key in data.PART} | {"weight": POSITIVE}
    if not isinstance(part, dict) or part.get("source") not in data.SOURCES:
        yield f"{where}={part}: it has to name a source ({', '.join(data.SOURCES)}), such as {PART_EXAMPLE}"
        return
    for key, value in part.items():
        if key not in rules:
            yield f"{where}.{key} is not a key: there are {', '.join(rules)}"
        elif not rules[key][1](value):
            yield f"{where}.{key}={value}: it has to be {rules[key][0]}"
    yield from misplaced(dict.fromkeys(data.PART) | part, f"{where}.")


def misplaced(part, prefix: str) -> Iterator[str]:
    """What a source lacks, or cannot use."""
    for key, takers in NEEDED.items():
        if takers.get(part["source"]) and part[key] is None:
            yield f"{prefix}{key} is needed with source {part['source']}: name {takers[part['source']]}"
        if part["source"] not in takers and part[key] is not None:
            yield f"{prefix}{key}={part[key]} has no part in data={part['source']}: say data={next(iter(takers))} too"


def unknown(key: str) -> str:
    near = [k for k in RULES if k.split(".")[-1] == key.split(".")[-1]] or difflib.get_close_matches(key, RULES, n=1)
    return f"{key} is not a key{f', did you mean {near[0]}?' if near else ': configs/config.yaml lists them'}"


def explain(error: Exception) -> str:
    """Hydra's and OmegaConf's complaints about a command line, in one sentence."""
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read: put a value with special characters into quotes, key=\"'value'\""
    if key := re.match(r"Could not override '([^']+)'", str(error)):
        return unknown(key[1])
    if group := re.match(r"In '.*': Could not find '(\w+)/(.*)'\s+Available options in .*:((\s+\w+\n)+)", str(error)):
        return f"{group[1]}={group[2]}: it has to be one of {', '.join(group[3].split())}"
    return " ".join(str(error).split())


def load(overrides: list[str]) -> tuple[DictConfig, Path]:
    """(config, run folder) of a command line, as `python -m nanoT5.main` composes them."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            cfg = compose("config", overrides, return_hydra_config=True)
        folder = Path(cfg.hydra.run.dir)
        with open_dict(cfg):
            del cfg["hydra"]
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except (*COMPLAINTS, ValueError) as error:  # Hydra raises a plain ValueError for data=null
        raise UserError(explain(error)) from None
    return cfg, folder
