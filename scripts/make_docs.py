"""Write the parts of the documentation that are made from the code.

    python scripts/make_docs.py
    python scripts/make_docs.py --check

With `--check`, it writes nothing, names the pages that are out of date, and exits with 1.
These are made:

    docs/commands.md   the whole page: the `--help` of every command
    docs/configs.md    the tables between `<!-- keys: … -->` and `<!-- end -->`: the keys of
                       every section, from the models that validate them. `A - B` are the keys
                       of A that B lacks or describes differently
    docs/tour.ipynb    the whole file: docs/tour.md as a notebook
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

import click
from pydantic import BaseModel

from featcache.audio.noise import NoisePolicy
from featcache.audio.waveform import AugmentPolicy
from featcache.cli import main as cli
from featcache.config import AudioPolicy, StorePolicy
from featcache.extractors import find
from featcache.extractors.base import _BUILT_IN
from featcache.extractors.model import Chunk, ModelParams
from featcache.extractors.onnx import Window

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 118  # of help texts, in characters
MANY = 3
"""From so many commands on, an option that they have stands once."""

SHARED = (AudioPolicy, StorePolicy, AugmentPolicy, NoisePolicy, ModelParams, Chunk, Window)
MODELS = {model.__name__: model for model in (*SHARED, *(find(name).Params for name in _BUILT_IN))}
TYPES = {
    "number": "number",
    "integer": "whole number",
    "boolean": "true, false",
    "string": "text",
    "object": "mapping",
}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def commands_page() -> str:
    """docs/commands.md. An option that many commands have, with the same help, stands
    once, after them."""
    parent = click.Context(cli, info_name="featcache", terminal_width=WIDTH, **cli.context_settings)
    contexts = {
        name: click.Context(
            cli.get_command(parent, name), info_name=name, parent=parent, terminal_width=WIDTH
        )
        for name in cli.list_commands(parent)
    }
    records = Counter(record for context in contexts.values() for _, record in _options(context))
    shared = {
        record[0]: record for record, count in reversed(records.most_common()) if count >= MANY
    }
    parts = [
        "# Commands",
        "Made by `python scripts/make_docs.py` from what `--help` says: do not edit. "
        "Options that many commands have are [at the end](#options-of-many-commands).",
        "Results go to stdout, progress and messages to stderr; `--json` prints one "
        "document on stdout. "
        'Tab completes in bash after `eval "$(_FEATCACHE_COMPLETE=bash_source '
        'featcache)"`, in zsh after the same with `zsh_source`, in fish after '
        "`_FEATCACHE_COMPLETE=fish_source featcache | source`.",
        *_section("featcache", cli.get_help(parent)),
    ]
    for name, context in contexts.items():
        also = []
        for option, record in _options(context):
            if record == shared.get(record[0]):
                option.hidden = True
                also.append(option.opts[-1])
        text = context.get_help()
        for option in context.command.params:
            option.hidden = False
        parts += _section(
            f"featcache {name}", text + (f"\n\nAnd: {', '.join(also)}" if also else "")
        )
    formatter = click.HelpFormatter(width=WIDTH)
    formatter.write_dl(sorted(shared.values()))
    parts += _section("Options of many commands", formatter.getvalue())
    return "\n\n".join(parts) + "\n"


def _options(context: click.Context) -> list[tuple[click.Option, tuple[str, str]]]:
    """The options of a command, each with its two columns of help."""
    options = [
        param
        for param in context.command.params
        if isinstance(param, click.Option) and not param.hidden
    ]
    return [
        (option, record)
        for option in options
        if (record := option.get_help_record(context)) is not None
    ]


def _section(title: str, text: str) -> list[str]:
    # click keeps the option of the first context that asks for it, with the names of that one
    of_help = "  -h, --help ", "  --help "
    lines = "\n".join(line.rstrip() for line in text.splitlines() if not line.startswith(of_help))
    lines = lines.replace("\n\nOptions:\n\nAnd:", "\n\nOptions:").removesuffix("\n\nOptions:")
    return [f"## {title}", f"```text\n{lines}\n```"]


def configs_page() -> str:
    """docs/configs.md, with its tables filled anew."""
    page = (DOCS / "configs.md").read_text(encoding="utf-8")
    return re.sub(
        r"(<!-- keys: (\w+)(?: - (\w+))? -->\n).*?(<!-- end -->)",
        lambda found: (
            f"{found[1]}\n{keys_table(MODELS[found[2]], MODELS.get(found[3]))}\n\n{found[4]}"
        ),
        page,
        flags=re.DOTALL,
    )


def keys_table(model: type[BaseModel], base: type[BaseModel] | None = None) -> str:
    """A Markdown table of a model's keys, in the order in which it declares them, without
    those that `base` has so."""
    shared = set(_key_rows(base)) if base else set()
    rows = [row for row in _key_rows(model) if row not in shared]
    return "\n".join(["| key | default | values | meaning |", "|---|---|---|---|", *rows])


def _key_rows(model: type[BaseModel]) -> list[str]:
    rows = []
    for key, schema in model.model_json_schema()["properties"].items():
        default = "" if (value := schema.get("default")) is None else f"`{_yaml(value)}`"
        rows.append(f"| `{key}` | {default} | {_values(schema)} | {_meaning(schema)} |")
    return rows


def _meaning(schema: dict) -> str:
    return " ".join(schema["description"].split())


def _values(schema: dict) -> str:
    """What a key may be: a type with its limits, or a list of words."""
    if "anyOf" in schema:
        return ", ".join(_values(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{_yaml(value)}`" for value in schema["enum"])
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2].lower().removesuffix('policy')}`: below"
    if schema["type"] == "array":
        return f"list of {_values(schema['items'])}".replace("number", "numbers")
    kind = TYPES.get(schema["type"], schema["type"])
    limits = ", ".join(
        f"{sign} {_yaml(schema[name])}" for name, sign in LIMITS.items() if name in schema
    )
    return f"{kind} {limits}".rstrip()


def _yaml(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def tour_notebook() -> str:
    """docs/tour.ipynb: the page's text, its blocks as cells, and what they print."""
    page = (DOCS / "tour.md").read_text(encoding="utf-8")
    text, *blocks = re.split(r"^```(\w+)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    cells = [_cell("markdown", text)]
    for language, code, text in zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True):
        if language == "text":
            printed = {"output_type": "stream", "name": "stdout", "text": code}
            cells[-1]["outputs"] = [printed]
        elif language == "python":
            cells.append(_cell("code", code))
        elif " && cd " in code:  # a cell's shell ends with it
            command, _, folder = code.strip().rpartition(" && cd ")
            copy = command.replace("examples", "../examples")
            cells += [_cell("code", f"%%bash\n{copy}"), _cell("code", f"%cd {folder}")]
        else:
            magic = "%%bash --no-raise-error" if "# exit code" in code else "%%bash"
            cells.append(_cell("code", f"{magic}\n{code}"))
        if text.strip():
            cells.append(_cell("markdown", text))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}}
    return json.dumps(notebook | {"nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _cell(kind: str, source: str) -> dict:
    cell = {"cell_type": kind, "metadata": {}, "source": source.strip()}
    return cell | ({"outputs": [], "execution_count": None} if kind == "code" else {})


PAGES = {"commands.md": commands_page, "configs.md": configs_page, "tour.ipynb": tour_notebook}


def stale() -> list[str]:
    """The pages that are not what the code says; how lines are broken does not matter."""
    return [name for name, page in PAGES.items() if _words(DOCS / name) != page().split()]


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split() if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        for name, page in PAGES.items():
            (DOCS / name).write_text(page(), encoding="utf-8")
    elif names := stale():
        sys.exit(
            f"out of date: {', '.join(f'docs/{name}' for name in names)}: run python "
            "scripts/make_docs.py"
        )


if __name__ == "__main__":
    main()
