"""`turnkeep models`: which models are on this machine, and how one gets here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gateway.commands.failure import CommandFailed, ExitCode
from gateway.commands.model_folder import need_engine_extra
from gateway.commands.options import Json, print_json, print_rows
from gateway.settings import DEMO_MODEL

app = typer.Typer(no_args_is_help=True, help="Models of the embedded engine.")
CARDS_GB = (8, 12, 16, 24)
SESSION_TOKENS = (2048, 8192, 32768)
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


@app.command()
def fit(
    model: Annotated[str, typer.Argument(help="A folder with a config.json; no weights are read.")],
    gb: Annotated[list[int] | None, typer.Option(min=1, help="Memory of the card in GiB; may be repeated.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a session; may be repeated.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="In host memory, where what is not quantized is float32.")] = False,
    json: Json = False,
) -> None:
    """What fits a card: weights, activations, and how many sessions the rest holds."""
    need_engine_extra()
    from engines.local.fit import fit as fitted
    from engines.local.fit import told
    from engines.local.footprint import read_footprint
    from engines.local.model import ModelRefused

    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise CommandFailed(ExitCode.MODEL, f"There is no config.json in {folder}.")
    try:
        footprint = read_footprint(folder, on_cpu=cpu)
    except (ModelRefused, ValueError, OSError) as error:
        raise CommandFailed(ExitCode.MODEL, f"The model {model} cannot be served: {error}") from error
    cards, lengths = gb or CARDS_GB, tuple(tokens or SESSION_TOKENS)
    fits = [fitted(footprint, size << 30, lengths, apart=not cpu) for size in cards]
    if json:
        print_json({**asdict(footprint), "cards": [{**asdict(one), "fits": one.fits} for one in fits]})
        return
    for note in footprint.notes:
        typer.echo(note, err=True)
    typer.echo("\n".join(told(footprint, size << 30) for size in cards))
    columns = ("CARD", *(f"{length:,} TOKENS" for length in fits[0].sessions))
    rows = []
    for size, one in zip(cards, fits, strict=True):
        held = [" / ".join(map(str, counts.values())) for counts in one.sessions.values()]
        rows.append((f"{size} GiB", *(held if one.fits else ["does not fit"] * len(held))))
    typer.echo("Sessions held at once, by kv_precision " + " / ".join(footprint.kv_bytes) + ":")
    print_rows(columns, rows, empty="")


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
