"""Reading and writing YAML and JSON."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from django.core.management import CommandError
from hypothesis import example, given
from hypothesis import strategies as st

from django_ratequota.exceptions import InvalidFile
from django_ratequota.policyfile import FORMATS, MAX_BYTES, apply_file, decode
from django_ratequota.policyfile.document import kind_of, read
from tests.policyfile.examples import HOSTILE, SAMPLE, document_text, export, refused, slugs, texts
from tests.support.commands import run
from tests.support.properties import examples

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@given(st.lists(st.dictionaries(slugs, texts, max_size=3), max_size=3))
@examples(150)
@example([{f"k{number}": text for number, text in enumerate(HOSTILE)}])
def test_any_text_survives_yaml_and_json(rows: list[dict[str, str]]) -> None:
    for form in FORMATS:
        text = document_text({"rows": rows}, form)
        nodes = read(text).value[0][1].value
        assert [{key.value: value.value for key, value in node.value} for node in nodes] == rows
        assert {kind_of(value) for node in nodes for _key, value in node.value} <= {"text"}
        assert text.replace("\n", "").isprintable()
    # PyYAML reads the same.
    assert yaml.safe_load(document_text({"rows": rows})) == {"rows": rows}


UNREADABLE = {
    "version: 1\nplans: *a": "2: : this is not valid YAML: found undefined alias",
    "version: 1\nplans: !!python/object/apply:os.system [id]": "2: plans[0]: this must be a mapping of fields",
    "{version: 1,\tplans: [}": "1: : this is not valid YAML: ",
    "version: 1\n---\nversion: 1": "2: : this is not valid YAML: expected a single document",
    "version: 1\nplans: " + "[" * 5000: "2: : this is not valid YAML: while increasing flow level exceeded maximum",
    "version: 1\nplans:\n\t- a": "3: : this is not valid YAML: while scanning for the next token ",
    "version: 1\nplans: [": "3: : this is not valid YAML: while parsing a flow node",
    'version: 1\nplans: "\\UFFFFFFFF"': "2: : this is not valid YAML: ",
    'version: 1\nplans:\n- slug: "\\0"\n  name: x': "3: plans[0].slug: text must not contain NUL characters",
    'version: 1\nplans: "\\ud83d"': "2: : this is not valid YAML: while parsing a quoted scalar ",
    "version: 1\nplans: '\x00'": "2: : write the character U+0000 as an escape",
    "%YAML " + "1" * 5000 + ".1\n---\nversion: 1": "1: : this is not valid YAML: ",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_invalid_and_unsupported_yaml_is_refused(text: str) -> None:
    [problem] = refused(text)
    assert problem.startswith(UNREADABLE[text])


@pytest.mark.parametrize(
    "text", ["[*a]", "\n- {slug: a}\n- {<<: *a}", f"[x, x]\nendpoints: [{', '.join(['*a'] * 9)}]"]
)
def test_aliases_in_a_policy_file(text: str) -> None:
    [problem] = refused(f"version: 1\nplans: &a {text}")
    assert problem.endswith(": : *a repeats another part of the file. Write that part out here")


def test_text_needs_no_quotes() -> None:
    """YAML reads ``off`` as false, 010 as 8 and & in the middle of text as itself; fields know better."""
    text = "version: 1\nendpoints:\n- {name: 010, routes: /a /b, methods: GET, description: R&D *}\n"
    apply_file(f"{text}policies:\n- {{endpoint: 010, rates: 1/s, mode: off, user: ~, durable: false}}")
    assert "name: '010'\n    routes:\n      - /a\n      - /b\n    methods:\n      - GET\n" in export()
    assert "mode: 'off'\n    durable: false\n" in export()


def test_messages_escape_terminal_codes(sample: None) -> None:
    key = "\x1b[2J\u202e" + "k" * 10_000
    problems = refused(document_text({"version": 1, "plans": [{"slug": "a\x1b]0;", "name": "A", key: "x"}]}))
    assert all(problem.isprintable() and len(problem) < 200 for problem in problems)
    assert "plans[0].\\u001b[2J\\u202ekkk" in "".join(problems)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"version: 1\n# \xff", "2: : this is not UTF-8 text"),
        (b"\xff\xfea", "1: : this is not UTF-16-LE text"),
        (b" " * (MAX_BYTES + 1), "1: : the file has more than 20 MB"),
    ],
)
def test_undecodable_and_oversized_files_are_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        decode(raw)
    assert [f"{line}: {path}: {message}" for line, path, message in caught.value.problems] == [problem]


def test_files_are_read_in_any_encoding_and_layout(
    sample: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(export("json"))
    path = tmp_path / "file"
    for raw in (
        SAMPLE.replace("\n", "\r\n").encode("utf-8-sig"),
        SAMPLE.encode("utf-16"),
        json.dumps(document, indent="\t").encode(),
        json.dumps(document, separators=(",", ":")).encode(),
    ):
        path.write_bytes(raw)
        assert run("import", str(path), "--prune") == f"No changes, because the database equals {path}\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SAMPLE.encode())))
    assert run("import", "-") == "No changes, because the database equals <stdin>\n"
    with pytest.raises(CommandError, match=r"none\.yaml cannot be read: No such file or directory"):
        run("import", str(tmp_path / "none.yaml"))
