"""``policies``, ``engines`` and ``schema``: what there is."""

from .. import report
from ..history import schema as history_schema
from ..naming import spec
from ..policy import presets
from .app import Json, Quick, app, err, out, print_json


@app.command
def policies(*, json: Json = False) -> int:
    """Show the presets, their slots and the fields of each."""
    specs = [spec(p) for p in presets().values()]
    if json:
        print_json(specs)
    else:
        report.policies(out, specs)
    return 0


@app.command
def engines(*, quick: Quick = False, json: Json = False) -> int:
    """Show which engines are installed, where, and what each can do here.

    Parameters
    ----------
    quick
        Start none of them: what they can do is asked of running engines, which takes up to a minute.
    json
        Print one JSON object instead of tables.
    """
    import asyncio

    from ..real.installs import engines as look
    from ..real.survey import capabilities

    found = look()
    able = {}
    for e in found if not quick else ():
        if e.ok:
            with report.progress(err, f"starting {e.name}"):
                able[e.name] = asyncio.run(capabilities(e.name))
    if json:
        print_json({"engines": found, "capabilities": able})
    else:
        report.engines(out, found)
        if able:
            report.capabilities(out, able)
    return 0


@app.command
def schema() -> int:
    """Print the JSON Schema of a history's lines."""
    print_json(history_schema())
    return 0
