"""The German texts: whole, true to the code's, compiled; and in place on the operators' pages and in refusals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any

import polib
import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import translation
from django.utils.translation.template import templatize

from django_ratequota.models import Endpoint, Plan, RatePolicy
from tests.browser.pages import PAGES
from tests.browser.scene import Scene

PACKAGE = Path(__file__).parents[2] / "django_ratequota"
LOCALE = PACKAGE / "locale" / "de" / "LC_MESSAGES"
#: gettext's functions, and how many texts they take.
FUNCTIONS = {"_": 1, "gettext": 1, "gettext_lazy": 1, "gettext_noop": 1, "ngettext": 2, "ngettext_lazy": 2}
PLACEHOLDER = re.compile(r"%\(\w+\)[a-z]|%[a-z%]|\{\w+\}")

# --- The file. ---


@pytest.fixture(scope="module")
def german() -> Any:
    return polib.pofile(str(LOCALE / "django.po"))


def in_python(source: str) -> Iterator[str]:
    """Return the texts that a module marks for translation, also inside f-strings: gettext's tools miss these."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            for argument in node.args[: FUNCTIONS[node.func.id]]:
                if isinstance(argument, ast.Constant):
                    yield argument.value


def in_template(source: str) -> Iterator[str]:
    """Return the texts that a template marks, as Django extracts them for gettext."""
    for literal in re.findall(r"""\b(?:u|_\()('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", templatize(source)):
        yield ast.literal_eval(literal)


def marked() -> set[str]:
    texts = set()
    for path in PACKAGE.rglob("*.py"):
        texts.update(in_python(path.read_text()))
    for path in chain(PACKAGE.rglob("*.html"), PACKAGE.rglob("templates/**/*.txt")):
        texts.update(in_template(path.read_text()))
    return texts


def test_the_catalogue_has_exactly_the_texts_of_the_code(german: Any) -> None:
    texts = {text for entry in german for text in (entry.msgid, entry.msgid_plural) if text}
    assert len(texts) > 600
    found = marked()
    assert found - texts == set(), "run make messages, and translate these"
    assert texts - found == set(), "run make messages: the code has these texts no more"


def test_no_translation_is_missing_or_fuzzy(german: Any) -> None:
    assert [entry.msgid for entry in german if not entry.translated()] == []
    assert (german.fuzzy_entries(), german.obsolete_entries()) == ([], [])
    assert german.metadata["Plural-Forms"] == "nplurals=2; plural=(n != 1);"


def test_placeholders_agree(german: Any) -> None:
    for entry in german:
        wanted = [sorted(PLACEHOLDER.findall(text)) for text in (entry.msgid, entry.msgid_plural) if text]
        for text in entry.msgstr_plural.values() or [entry.msgstr]:
            assert sorted(PLACEHOLDER.findall(text)) in wanted, entry.msgid


def test_the_compiled_catalogue_is_up_to_date(german: Any) -> None:
    def texts(entries: Any) -> dict[str, Any]:
        return {e.msgid: e.msgstr_plural or e.msgstr for e in entries}

    assert texts(polib.mofile(str(LOCALE / "django.mo"))) == texts(german), "run make messages"


def test_keywords_that_operators_type_are_not_translated(german: Any) -> None:
    words = re.compile(r"\b(unlimited|caller(?= \()|token_bucket|kind:value|[a-z]+:\*|[A-Z]+_[A-Z_]+|ip:[\d.]+\d)")
    for entry in german:
        typed = set(words.findall(entry.msgid)) - {"kind:value"}
        assert typed <= set(words.findall(entry.msgstr or entry.msgstr_plural[1])), entry.msgid


# --- The pages. ---


class Reader(HTMLParser):
    """Collects a page's texts, headings, and the attributes that machines read."""

    TRANSLATED_ATTRIBUTES = frozenset({"title", "aria-label", "placeholder", "alt"})

    def __init__(self, page: Any) -> None:
        super().__init__()
        assert page.status_code == 200, page.headers
        self.texts: list[str] = []
        self.headings: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self._open: list[str] = [""]
        self.feed(page.content.decode())

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._open.append(tag)
        button = dict(attrs).get("type") in ("submit", "button")
        for name, value in attrs:
            if name in self.TRANSLATED_ATTRIBUTES or (name == "value" and button):
                self.texts.append(value or "")
            else:
                self.attributes.append((tag, name, value or ""))

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        if text and self._open[-1] not in ("script", "style"):
            (self.headings if self._open[-1] in ("h1", "h2", "h3", "th") else self.texts).append(text)


@pytest.fixture
def operator(settings: Any) -> Iterator[Client]:
    """A superuser with a browser set to German."""
    at = settings.MIDDLEWARE.index("django.contrib.sessions.middleware.SessionMiddleware") + 1
    ours = "django.middleware.locale.LocaleMiddleware"
    settings.MIDDLEWARE = [*settings.MIDDLEWARE[:at], ours, *settings.MIDDLEWARE[at:]]
    client = Client(headers={"accept-language": "de"})
    with translation.override("en-us"):  # the middleware leaves the last request's language behind
        yield client


HEADINGS = {
    "policies": ["Regel zur Änderung auswählen"],
    "add policy": ["Regel hinzufügen", "Ausprobieren"],
    "give back": ["Gutschreiben oder zurücksetzen", "Wer", "Limit", "Verbraucht", "Übrig"],
    "explained": ["Erklären", "Kunde und Anfrage", "Jetzt geltende Limits"],
    "traffic": ["Anfragen", "Endpunkte", "Aktivste Kunden", "Letzte Ablehnungen"],
    "health": ["Zustand", "Ausfälle von Redis"],
    "matrix": ["Geltende Raten nach Tarif", "Endpunkt", "alle"],
    "history": ["Verlauf"],
    "restore": ["Version vor 02.11.2026 09:30 UTC wiederherstellen"],
    "copy": ["Tarif Free kopieren"],
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
def test_every_page_is_entirely_in_german(operator: Client, german: Any) -> None:
    scene = Scene()
    scene.traffic()
    operator.force_login(scene.operators["superuser"])
    english = {e.msgid for e in german if " " in e.msgid and "%" not in e.msgid} | {"Admitted", "Refused", "Rates"}
    for name, page in PAGES.items():
        found = Reader(operator.get(page.path(scene), follow=True))
        said = {text.strip(" .›:") for text in (*found.texts, *found.headings)}
        assert {text for text in english if text.strip(" .:") in said} == set(), name
        assert set(HEADINGS.get(name, ())) <= set(found.headings), name


@pytest.mark.django_db
@pytest.mark.usefixtures("fresh_policies")
def test_form_errors_are_in_german(operator: Client) -> None:
    operator.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    user, plan = User.objects.create(username="u"), Plan.objects.create(name="Free", slug="free")
    form = {
        "user": user.pk,
        "plan": plan.pk,
        "counted_per": "caller",
        "rates": "1/s",
        "mode": "enforce",
        "algorithm": "gcra",
    }

    def said(**fields: Any) -> str:
        return " ".join(Reader(operator.post("/admin/django_ratequota/ratepolicy/add/", form | fields)).texts)

    assert "Wählen Sie nur eine Zielgruppe (Benutzer, Subjekt, Liste oder Tarif)" in said()
    assert "Geben Sie Art:Wert ein, etwa ip:203.0.113.7. Die Art" in said(subject="acme", user="", plan="")
    wrong = said(rates="100/fortnight")
    assert "erwartet bei Zeichen 5: eine Zeiteinheit (s, min, hour, day, week oder month), nicht 'fort" in wrong
    assert "expected" not in wrong, "neither the field nor the model has an English message"
    estimate = operator.post("/admin/django_ratequota/ratepolicy/impact/", form | {"rates": "0/min"})
    assert "Limit muss eine ganze Zahl von 1 bis 1000000000000 sein, nicht 0" in estimate.content.decode()


@pytest.mark.django_db
@pytest.mark.usefixtures("fresh_policies")
def test_values_for_machines_are_not_localized(operator: Client, settings: Any) -> None:
    """No decimal comma in a drawing, no thousands separator in an id or a form's number."""
    settings.USE_THOUSAND_SEPARATOR = True
    pk = User._meta.pk.get_default() or 12345
    user = User.objects.create(id=pk, username="root", is_staff=True, is_superuser=True)
    operator.force_login(user)
    search = Endpoint.objects.create(id=12345, name="search", cost=12345)
    Plan.objects.create(id=12345, name="Free", slug="free", default_for="authenticated")
    RatePolicy.objects.create(id=12345, user=user, endpoint=search, rates="12345/7s burst 23456")
    RatePolicy.objects.create(id=23456, plan_id=12345, rates="12345/7s")
    policies, query = "/admin/django_ratequota/ratepolicy/", f"user={pk}&endpoint=search&method=GET&cost=12345"
    pages = {
        "list": operator.get(policies),
        "form": operator.get(f"{policies}12345/change/"),
        "estimate": operator.post(f"{policies}impact/?object=12345"),
        "reset": operator.get(f"{policies}counters/?{query}&bucket=search/7s"),
        "explain": operator.get(f"{policies}explain/?{query}"),
        "boost": operator.get(f"{policies}boost/?{query}&policy=23456"),
        "usage": operator.get(f"{policies}traffic/?span=day&policy=12345"),
        "matrix": operator.get("/admin/django_ratequota/plan/matrix/"),
        "copy": operator.get("/admin/django_ratequota/plan/12345/copy/"),
        "endpoint": operator.get("/admin/django_ratequota/endpoint/12345/change/"),
        "history": operator.get("/admin/django_ratequota/policychange/"),
    }
    drawn = 0
    for where, page in pages.items():
        found = Reader(page)
        for tag, name, value in found.attributes:
            assert "12.345" not in value, (where, tag, name, value)
            assert "23.456" not in value, (where, tag, name, value)
            if name in ("x", "y", "width", "height", "d", "viewbox", "dy") and tag in ("svg", "rect", "path", "text"):
                drawn += 1
                assert re.fullmatch(r"[-A-Za-z\d. ]*", value), (where, tag, name, value)
        texts = " ".join((*found.texts, *found.headings))
        assert not re.search(r"Regel (12\.345|23\.456)", texts), where
    assert drawn > 50


@pytest.mark.django_db
@pytest.mark.usefixtures("fresh_policies")
def test_a_refusal_is_in_the_language_of_the_client(operator: Client) -> None:
    RatePolicy.objects.create(rates="1/min", counted_per="everyone")
    assert operator.get("/decorated/").status_code == 200
    for language, title, text in (
        ("de-AT", "Kontingent überschritten", "Zu viele Anfragen. Versuchen Sie es in "),
        ("en", "Quota exceeded", "Too many requests. Try again in "),
    ):
        refused = operator.get("/decorated/", headers={"accept-language": language, "accept": "application/json"})
        assert refused.status_code == 429
        assert refused.json()["title"] == title
        assert refused.json()["detail"].startswith(text)
