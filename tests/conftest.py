import gzip
import inspect
import json
from pathlib import Path

import hub
import pytest
import torch

from nanoT5 import docstrings

torch.set_num_threads(1)  # of more a tiny model has no gain, and to the bit the same sums take the same number


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Real prose: what some fifty modules of the standard library say, a document each."""
    library = Path(inspect.getfile(json)).parent.parent
    texts = (
        "\n".join(p for d in docstrings.parse(path) for p in docstrings.prose(d))
        for path in sorted(library.glob("*.py"))
    )
    return [text for text in texts if len(text) > 500]


@pytest.fixture(scope="session")
def corpus(documents, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny(corpus, cache) -> list[str]:
    """Overrides for a run of seconds: a small model on a small corpus."""
    return [
        "data=text",
        f"data.path={corpus}",
        f"data.cache={cache}",
        "data.vocab_size=512",
        "data.input_length=32",
        "data.held_out=0.1",
        "data.streams=4",
        "data.shuffle_block=16",
        "model.d_model=32",
        "model.d_kv=8",
        "model.d_ff=48",
        "optim.batch_size=8",
        "optim.total_steps=6",
        "optim.warmup_steps=2",
        "eval.steps=2",
        "eval.batch_size=8",
        "device=cpu",
        "precision=fp32",
    ]


@pytest.fixture(scope="session")
def c4(documents, tmp_path_factory):
    """A folder with allenai/c4: 32 files to train on, 2 to validate with."""
    root = tmp_path_factory.mktemp("hub")

    def files(texts: list[str], count: int) -> list[bytes]:
        lines = [json.dumps({"text": text, "url": "", "timestamp": ""}) for text in texts]
        return [gzip.compress("\n".join(lines[i::count]).encode()) for i in range(count)]

    hub.write_c4(root, train=files(documents[8:], 32), validation=files(documents[:8], 2))
    return root
