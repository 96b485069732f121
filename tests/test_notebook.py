"""The notebook, executed cell by cell as its readers do."""

import shutil
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent


def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(ROOT / "scripts" / "nanoT5.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    for name in ("nanoT5", "configs", "requirements.txt"):  # it writes its runs beside them
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (parameter,) = [cell for cell in notebook.cells if cell.source.startswith("STEPS = ")]
    parameter.source = "STEPS = 36"
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "step 36/36" in "".join(output.get("text", "") for output in outputs)  # live, of both ways to run it
    data = [output["data"] for output in outputs if "data" in output]
    assert any("image/png" in mime for mime in data)
    assert any("Span(text=" in mime.get("text/plain", "") for mime in data)
