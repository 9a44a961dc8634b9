"""`turnkeep models`: which models are on this machine, and how one gets here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.commands.failure import CommandFailed, ExitCode
from gateway.commands.model_folder import need_engine_extra
from gateway.commands.options import Json, print_json, print_rows
from gateway.settings import DEMO_MODEL

app = typer.Typer(no_args_is_help=True, help="Models of the embedded engine.")
Model = Annotated[str, typer.Argument(help="A name or a folder.")]


@app.command("list")
def list_models(json: Json = False) -> None:
    """The models that were fetched to this machine."""
    from engines.local.weights import is_model_folder, models_dir

    place = models_dir()
    folders = sorted(folder for folder in place.iterdir() if is_model_folder(folder)) if place.is_dir() else []
    found = [{"name": folder.name, "folder": str(folder.resolve()), "bytes": _bytes(folder)} for folder in folders]
    if json:
        print_json(found)
        return
    rows = [(model["name"], f"{int(str(model['bytes'])) / 1e6:,.0f} MB", model["folder"]) for model in found]
    print_rows(
        ("NAME", "SIZE", "FOLDER"), rows, empty=f"No model is in {place} yet: `turnkeep models fetch` brings one."
    )


@app.command()
def fetch(model: Model = DEMO_MODEL) -> None:
    """Fetch a model, and convert it where that must be; what is here already is left alone."""
    typer.echo(_resolved(model))


@app.command()
def path(model: Model = DEMO_MODEL) -> None:
    """Print a model's folder, fetched if it is not here. Only the folder goes to standard output."""
    typer.echo(_resolved(model))


def _resolved(model: str) -> Path:
    from engines.local.weights import ModelUnavailable, resolve_model

    if not Path(model).is_dir():
        need_engine_extra()
    try:
        return resolve_model(model, progress=lambda text: typer.echo(text, err=True)).resolve()
    except ModelUnavailable as error:
        raise CommandFailed(ExitCode.MODEL, f"The model {model} cannot be used: {error}") from error


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
