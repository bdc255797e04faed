"""Write the parts of the pages that come from the code: tables (settings, commands, fields, overshoot) and plots.

python -m docs.generate    # needs the group "test" of pyproject.toml

A table stands between ``<!-- generated: name -->`` and ``<!-- end -->``; the text around it is written by hand.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

DOCS = Path(__file__).parent


def settings() -> Iterator[str]:
    """Yield a section for each key of RATEQUOTA: meaning (its comment in conf.py), default and accepted values.

    Sections, because other pages can link to their headings: ``settings.md#timeout``.
    """
    from django_ratequota import conf

    source = inspect.getsource(conf.Settings)
    comments = re.findall(r"((?:    #: .*\n)+)    (\w+): ", source)
    meanings = {name: " ".join(re.findall(r"#: (.*)", comment)) for comment, name in comments}
    for key, field in sorted(conf.KEYS.items()):
        default = getattr(conf.Settings(), field.name)
        shown = (
            "Django's" if key == "TIME_ZONE" else f"`{list(default) if isinstance(default, tuple) else default!r}`"
        )
        # No key accepts a plain object, so the hint says what it accepts.
        [problem] = conf.read({key: object()})[1]
        accepts = re.sub(r"^(Write|[A-Z]+ must be) ", "", problem.hint)
        others = "|".join(conf.KEYS.keys() - {key})
        meaning = re.sub(rf"`({others})`", lambda one: f"[{one[0]}](#{one[1].lower()})", meanings[field.name])
        yield from (f"## `{key}`", "", meaning, "", f"Default: {shown}. Accepts {accepts.rstrip('.')}.", "")


def commands() -> Iterator[str]:
    """Yield the verbs of ``manage.py ratequota`` with their options, those of a customer and a request once."""
    from django_ratequota.management.callers import add_caller
    from django_ratequota.management.commands.ratequota import Command

    parser = argparse.ArgumentParser()
    Command().add_arguments(parser)  # without Django's own options
    [verbs] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {action.dest: action.help for action in verbs._choices_actions}
    shared = argparse.ArgumentParser(add_help=False)
    add_caller(shared)
    yield from ("## Options for a customer and a request", "", *_options(shared._actions))
    of_callers = {action.dest for action in shared._actions}
    shared_options = "[options for a customer and a request](#options-for-a-customer-and-a-request)"
    for verb, of_verb in verbs.choices.items():
        yield from (f"## `ratequota {verb}`", "", str(helps[verb]), "")
        options = [action for action in of_verb._actions if action.dest != "help"]
        if of_callers <= {action.dest for action in options}:
            yield from (f"Takes the {shared_options}.", "")
            options = [action for action in options if action.dest not in of_callers]
        yield from _options(options)


def _options(options: Sequence[argparse.Action]) -> Iterator[str]:
    if options:
        yield "| option | meaning |"
        yield "|---|---|"
    for option in options:
        name = option.option_strings[-1] if option.option_strings else str(option.metavar or option.dest.upper())
        value = option.metavar or option.dest.upper()
        value = "|".join(option.choices) if option.choices else str(value)
        takes = f" {value}" if option.option_strings and option.nargs != 0 else ""
        yield _row(f"`{name}{takes}`".replace("|", "\\|"), str(option.help))
    if options:
        yield ""


def fields() -> Iterator[str]:
    """Yield the fields of the models with their help texts in the admin."""
    from django.utils import translation

    from django_ratequota.models import Endpoint, ListMember, Plan, PlanAssignment, RatePolicy, SubjectList

    with translation.override("en"):
        for model in (RatePolicy, Endpoint, Plan, PlanAssignment, SubjectList, ListMember):
            yield from (f"## {str(model._meta.verbose_name).capitalize()}", "", "| field | meaning |", "|---|---|")
            for field in model._meta.fields:
                if field.help_text:
                    named = [str(value).lower() for value, _ in field.choices or () if value not in ("", None)]
                    choices = ", ".join(f"`{value}`" for value in named)
                    meaning = str(field.help_text).replace("*", r"\*")
                    yield _row(f"`{field.name}`", f"{meaning} One of {choices}." if choices else meaning)
            yield ""


def overshoot() -> Iterator[str]:
    """Yield what textbook limiters admit above a limit, and what this package admits."""
    from benchmarks import overshoot

    return overshoot.rows()


#: Name of a table -> its page, and the function that yields its rows.
TABLES = {
    "settings": ("reference/settings.md", settings),
    "commands": ("reference/commands.md", commands),
    "fields": ("reference/fields.md", fields),
    "overshoot": ("scaling.md", overshoot),
}


def page(name: str) -> str:
    """Return the text of the page, with this table as generated now."""
    file, rows = TABLES[name]
    table = "\n".join(rows()).strip()
    text = (DOCS / file).read_text()
    pattern = rf"(<!-- generated: {name} -->\n).*?(\n<!-- end -->)"
    written, count = re.subn(pattern, lambda found: f"{found[1]}\n{table}\n{found[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{file} has {count} places for the table {name!r}")
    return written


def _row(*cells: str) -> str:
    escaped = [re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in cells]
    return f"| {' | '.join(escaped)} |"


def main() -> None:
    """Write the tables and the plots."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.project.settings")
    import django

    django.setup()
    from docs import plots

    for name, (file, _) in TABLES.items():
        (DOCS / file).write_text(page(name))
    for file, drawing in plots.draw().items():
        (plots.IMAGES / file).write_text(drawing)


if __name__ == "__main__":
    main()
