"""``policies``, ``engines`` and ``schema``: what there is."""

from .. import report
from ..history import schema as history_schema
from ..naming import spec
from ..policy import presets
from .app import Json, app, out, print_json


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
def engines(*, json: Json = False) -> int:
    """Show which engines are installed, with their versions and interpreters."""
    from ..real.installs import engines as look

    found = look()
    if json:
        print_json(found)
    else:
        report.engines(out, found)
    return 0


@app.command
def schema() -> int:
    """Print the JSON Schema of a history's lines."""
    print_json(history_schema())
    return 0
