"""Users by name, display names and mail addresses of subjects such as ``tenant:acme``, and the search of subjects.

The names and addresses, and the search for names, are functions of the project.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from ipaddress import ip_network
from itertools import islice, takewhile
from traceback import format_exception_only
from typing import Any, TypeVar

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db import connections, transaction
from django.db.models import F, Q, QuerySet, Value
from django.db.models.functions import Lower
from django.utils import timezone
from django.utils.module_loading import import_string
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from ..changes.databases import policy_alias, subject_begins
from ..changes.validators import primary_key, visible
from ..changes.writer import in_batches
from ..conf import settings
from ..exceptions import StoreError
from ..models import QuotaWindow
from ..utils.addresses import is_within, named_network, networks_around
from ..utils.problems import note_problem
from .recorded import object_names

#: Maximum number of subjects that are offered, and of rows that are read to find them: a subject may have several.
MAX_OFFERED, _MAX_ROWS = 20, 200
_SEEN = timedelta(hours=48)
#: Maximum length of a display name, and maximum number of subjects found by a part of it.
MAX_NAME, _MOST_FOUND = 100, 1_000
#: Texts that one query looks up: that of email addresses reads all users, because no index ignores case. Maximum
#: length of the list of those that one text names.
_TEXTS, _MOST_LISTED = 5_000, 500
#: What no stored text has, and what databases' drivers raise errors for: NUL and lone surrogates.
_UNSTORED = re.compile("[\0\ud800-\udfff]")
#: Characters that a terminal may obey.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]+")
_Result = TypeVar("_Result")


def find_accounts(texts: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return text -> subject -> login name of each account that has the text as its login name, email address or key.

    ``user:KEY`` is always the key. Case does not matter in an email address. One query for 5,000 texts.
    """
    model: Any = get_user_model()
    login, mail = model._meta.get_field(model.USERNAME_FIELD), getattr(model, "EMAIL_FIELD", "")
    # Django sets EMAIL_FIELD where there is no such field, too.
    has_mail = any(field.name == mail for field in model._meta.concrete_fields)
    users = model._base_manager.using(policy_alias(model)).order_by("pk")
    users = users.annotate(ratequota_mail=F(mail) if has_mail else Value(""), ratequota_lower=Lower("ratequota_mail"))
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    asked = sorted({text for text in texts if not _UNSTORED.search(text)})
    for batch in in_batches(asked, _TEXTS):
        keys, logins, mails = (defaultdict[Any, list[str]](list) for _column in range(3))
        for text in batch:
            if (key := primary_key(model, text.removeprefix("user:"))) is not None:
                keys[key].append(text)
            if not text.startswith("user:"):
                with suppress(ValidationError):  # the field may be a number
                    logins[login.to_python(text)].append(text)
                if "@" in text:
                    mails[text.lower()].append(text)
        # As they are typed, too: SQLite puts no letters beyond ASCII in lower case.
        typed = [text for same in mails.values() for text in same]
        chosen = Q(pk__in=keys) | Q((f"{login.name}__in", logins))
        chosen |= Q(ratequota_lower__in=mails) | Q(ratequota_mail__in=typed)
        for pk, name, address in users.filter(chosen).values_list("pk", login.name, "ratequota_mail"):
            # Compared again, because MariaDB ignores case and accents.
            for text in (*keys[pk], *logins[name], *mails[(address or "").lower()]):
                found[text][f"user:{pk}"] = str(name)
    return found


def subject_of(customer: Any) -> str:
    """Return the subject of a customer, a user or a subject already; raises ``TypeError``."""
    if isinstance(customer, get_user_model()):
        return f"user:{customer.pk}"
    if not isinstance(customer, str):
        raise TypeError(f"customer is a user or a subject such as 'tenant:acme', not {customer!r:.100}")
    return customer


def only_account(matches: Mapping[str, str]) -> tuple[str, str]:
    """Return the subject and the name of the only match; raises ``ValidationError`` with none and with several.

    There are several where a stranger's login name equals a customer's email address or key.
    """
    if not matches:
        raise ValidationError(_("There is no such user."))
    if len(matches) > 1:
        listed = ", ".join(f"{one} ({_name(name)})" if name else one for one, name in matches.items())
        text = _("%(count)d accounts match: %(accounts)s. Enter the one that you mean as kind:value.")
        raise ValidationError(text % {"count": len(matches), "accounts": Truncator(listed).chars(_MOST_LISTED)})
    return next(iter(matches.items()))


def policies_in(network: str, policies: QuerySet[Any]) -> list[Any]:
    """Return those of the policies for a network such as ``ip:203.0.113.0/24``, a wider one, or one in it."""
    outer = ip_network(network.removeprefix("ip:"))
    wider = networks_around(outer)
    ends = zip(str(outer[0]), str(outer[-1]), strict=False)
    begins = "".join(one for one, _other in takewhile(lambda pair: pair[0] == pair[1], ends))
    found = policies.filter(Q(subject__in=wider) | subject_begins(f"ip:{begins}", policies.db))
    found = found.select_related("user", "subject_list", "plan", "endpoint").order_by("subject", "pk")[:_MAX_ROWS]
    return [one for one in found if one.subject in wider or is_within(named_network(one.subject), outer)]


def known_subjects(text: str, tables: Iterable[QuerySet[Any]], *, seen: bool) -> list[str]:
    """Return subjects that begin with ``text``, in alphabetical order, at most ``MAX_OFFERED``.

    Without a colon, ``text`` begins the value of any identifier: ``ac`` finds ``tenant:acme``. ``tables`` are rows
    with a subject; with ``seen``, subjects counted in the last 48 hours are searched, too, and names.
    """
    from ..monitoring.timeline import seen_callers  # which setting up Django does not need

    if "\x00" in text:
        return []
    found: set[str] = set()
    sources = [rows.order_by() for rows in tables]
    if seen:
        sources.append(QuotaWindow.objects.filter(written_at__gt=timezone.now() - _SEEN).order_by())
        found.update(identified_subjects(text)[:MAX_OFFERED])
    for prefix in _prefixes(text):
        if len(found) >= MAX_OFFERED:
            break
        for rows in sources:
            subjects = rows.filter(subject_begins(prefix, rows.db)).values_list("subject", flat=True)[:_MAX_ROWS]
            # The database may ignore case.
            found.update(subject for subject in subjects if subject.startswith(prefix))
        # Statistics count callers only.
        if seen and prefix.partition(":")[0] in settings.caller and len(found) < MAX_OFFERED:
            with suppress(StoreError):  # the database knows some
                found.update(seen_callers(prefix, MAX_OFFERED))
    kinds = ("ip", *settings.identifiers)
    return sorted(one for one in found if one.partition(":")[0] in kinds)[:MAX_OFFERED]


def _prefixes(text: str) -> list[str]:
    if ":" in text:
        return [text]
    kinds = [f"{kind}:" for kind in settings.identifiers]
    return [kind for kind in kinds if kind.startswith(text)] + [f"{kind}{text}" for kind in kinds if text]


def subject_names(subjects: Iterable[str]) -> dict[str, str]:
    """Return subject -> display name of those that SUBJECT_NAMES names, in one call of it."""
    return _ask(settings.subject_names, subjects, _name)


def customer_emails(subjects: Iterable[str]) -> dict[str, str]:
    """Return subject -> mail address of those that CUSTOMER_EMAILS has one for, in one call of it."""
    return _ask(settings.customer_emails, subjects, str)


def subjects_named(text: str) -> list[str]:
    """Return subjects with the text in their names: users, and what SUBJECT_NAMES' ``ratequota_search`` finds."""
    model: Any = get_user_model()
    users = model._default_manager.filter(**{f"{model.USERNAME_FIELD}__icontains": text})
    keys = users.order_by().values_list("pk", flat=True)[:_MOST_FOUND]
    return [*(f"user:{pk}" for pk in keys), *identified_subjects(text)]


def identified_subjects(text: str) -> list[str]:
    """Return subjects of IDENTIFIERS with the text in their names, as far as the project can search them."""

    def search(names: Any) -> list[str]:
        found: Any = getattr(names, "ratequota_search", lambda _text: ())(text)
        return [subject for subject in islice(found, _MOST_FOUND) if _is_identified(subject)]

    return _call(settings.subject_names, search) or [] if text else []


def _ask(path: str, subjects: Iterable[str], text: Callable[[Any], str]) -> dict[str, str]:
    """Return subject -> text of what the function at ``path`` returns of those of IDENTIFIERS."""
    asked = sorted({subject for subject in subjects if _is_identified(subject)})

    def answer(function: Any) -> dict[str, str]:
        found = function(asked) or {}
        return {subject: one for subject in asked if found.get(subject) and (one := text(found[subject]))}

    return _call(path, answer) or {} if asked else {}


def _call(path: str, use: Callable[[Any], _Result]) -> _Result | None:
    """Return what ``use`` makes of the function at ``path``; None where none is, or it raises, which is logged."""
    try:
        with ExitStack() as savepoints:
            for connection in connections.all(initialized_only=True):
                if connection.in_atomic_block:  # else its failing query would end the page's transaction, too
                    savepoints.enter_context(transaction.atomic(using=connection.alias))
            return use(import_string(path)) if path else None
    except Exception as error:
        note_problem(path, f"{path} failed: {format_exception_only(error)[-1].strip()}", error)
        return None


def names_of(subjects: Iterable[str]) -> dict[str, str]:
    """Return subject -> user name, or display name: users in one query, others in one call of SUBJECT_NAMES."""
    subjects = set(subjects)
    ids = {subject: subject.removeprefix("user:") for subject in subjects if subject.startswith("user:")}
    users = object_names(get_user_model(), ids.values(), lambda user: user.get_username())
    return {subject: users[pk] for subject, pk in ids.items() if pk in users} | subject_names(subjects - ids.keys())


def named(subject: str, name: str) -> str:
    """Return a subject with its display name, ``Acme GmbH (tenant:acme)``; the subject alone without one."""
    return f"{name} ({subject})" if name else subject


def _is_identified(subject: str) -> bool:
    kind, _colon, value = subject.partition(":")
    return bool(value) and kind in settings.identifiers


def _name(value: Any) -> str:
    """Return the display name on one line, cut, without characters that reverse text or control a terminal."""
    text = visible(_CONTROL.sub(" ", str(value))).strip()
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}…"
