"""Forms that two operators may have open at once: each writes only what its operator changed.

The values that a form was rendered with travel with it, signed. Fields that the operator left alone keep what is
stored now. A field that somebody else changed meanwhile to another value is refused once. The form then comes back
with the values that are stored now, so saving it again overwrites them knowingly.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.core import signing
from django.utils.functional import cached_property
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..changes.databases import policy_alias
from ..changes.validators import primary_key
from ..changes.writer import field_values, rows_by_pk
from ..models import PolicyChange
from ..operations.recorded import read_value, who_changed

#: Name of the hidden input with the signed values.
_SEEN = "seen"


class _FreshField(forms.BoundField):
    """A field that shows what the operator changed, else what is stored. The first one carries the signed values."""

    def value(self) -> Any:
        """Return the value to show."""
        form: Any = self.form
        if self.name in form.kept:
            return self.field.prepare_value(form.rendered(form.stored, self.name))
        return super().value()

    def as_widget(self, *args: Any, **kwargs: Any) -> SafeString:
        """Return the widget, which pages render by this alone, whatever their template."""
        form: Any = self.form
        widget = super().as_widget(*args, **kwargs)
        return widget + form.seen_input() if self.name == next(iter(form.fields)) else widget


class FreshForm(forms.ModelForm):  # type: ignore[type-arg]
    """A form of an object that somebody else may change while it is open."""

    bound_field_class = _FreshField

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deleted = False
        #: The stored values of the form's fields; None where the object is not stored.
        self.stored: dict[str, Any] | None = None
        if self.instance.pk is not None:
            self.stored = self._values(self.instance)

    @cached_property
    def seen(self) -> Any:
        """The values that the operator saw when the form was rendered; None if they are missing or not our own."""
        return self._seen_of(self.instance)

    @cached_property
    def changed_data(self) -> list[str]:
        """The fields that the operator changed, without those that have the new value already."""
        # On a page that was tampered with, all that differs from what is stored: it is refused.
        changed: list[str] = super().changed_data
        if not self.is_bound or self.stored is None or self.seen is None:
            return changed
        own = self.stored.keys() & self.fields.keys()
        mine = {name for name in own & self.seen.keys() if self._differs(name, self.seen)}
        if mine:
            self._lock()
        return [
            name
            for name in self.fields
            if (name in mine and self._differs(name, self.stored)) or (name in changed and name not in own)
        ]

    @property
    def kept(self) -> set[str]:
        """The fields that the operator left alone."""
        if not self.is_bound or self.stored is None:
            return set()
        return (self.stored.keys() & self.fields.keys()) - {*self.changed_data}

    def is_untouched(self) -> bool:
        """Return whether a row that is not stored any more was sent as it was rendered, or not sent."""
        model: Any = type(self.instance)
        pk = self.data.get(self.add_prefix(model._meta.pk.name))
        if pk is None:
            return True
        seen = self._seen_of(model(pk=primary_key(model, pk)))
        return bool(seen) and not any(self._differs(name, seen) for name in self.fields.keys() & seen.keys())

    def full_clean(self) -> None:
        """Validate what will be stored; refuse what somebody else changed meanwhile."""
        super().full_clean()
        if not self.is_bound or self.stored is None or not self.changed_data:
            return
        if self._deleted:
            self.add_error(None, _("It was deleted in the meantime."))
        if self.seen is None:
            text = _(
                "This page cannot be saved, because it does not contain the values that you saw. Open it again in "
                "another tab and repeat the change."
            )
            self.add_error(None, text)
            return
        for name in self.changed_data:
            if name in self.stored and self.seen[name] != self.stored[name]:
                self.add_error(name, self._conflict(name, self.seen[name], self.stored[name]))

    def seen_input(self) -> SafeString:
        """Return the hidden input with the values that are stored now; of a refused page, with what it sent."""
        if self.stored is None:
            return SafeString()
        name = self.add_prefix(_SEEN)
        refused = self.is_bound and self.seen is None
        value = self.data.get(name, "") if refused else signing.dumps(self.stored, salt=_salt(self.instance))
        return forms.HiddenInput().render(name, value)

    def _clean_fields(self) -> None:
        """Clean what the operator changed, and complete it by what is stored."""
        fields, kept = self.fields, self.kept
        self.fields = {name: field for name, field in fields.items() if name not in kept}
        super()._clean_fields()  # type: ignore[misc]
        self.fields = fields
        self.cleaned_data |= {name: getattr(self.instance, name) for name in kept}

    def _seen_of(self, instance: Any) -> Any:
        try:
            return signing.loads(self.data.get(self.add_prefix(_SEEN), ""), salt=_salt(instance))
        except signing.BadSignature:
            return None

    def _values(self, instance: Any) -> dict[str, Any]:
        """Return the stored values of the form's fields; those that a formset adds are none of the object."""
        names = {field.name for field in instance._meta.concrete_fields} & self.base_fields.keys()
        return {name: value for name, value in field_values(instance).items() if name in names}

    def rendered(self, values: dict[str, Any], name: str) -> Any:
        """Return the initial value of the field in a form of an object with these stored values."""
        value = read_value(self.instance._meta.get_field(name), values[name])
        return forms.Form(initial={name: value}).get_initial_for_field(self.fields[name], name)

    def _differs(self, name: str, values: dict[str, Any]) -> bool:
        """Return whether the sent value of a field is not that of an object with these stored values."""
        initial, sent = (_with_line_ends(value) for value in (self.rendered(values, name), self[name].data))
        return bool(self.fields[name].has_changed(initial, sent))

    def _lock(self) -> None:
        """Lock the stored row until the transaction ends, and take its values, which code may just have changed."""
        model = type(self.instance)
        row = rows_by_pk(model, [self.instance.pk], policy_alias(model), lock=True).get(self.instance.pk)
        self._deleted = row is None
        if row is None or (values := self._values(row)) == self.stored:
            return
        self.stored = values
        for field in model._meta.concrete_fields:
            setattr(self.instance, field.attname, getattr(row, field.attname))

    def _conflict(self, name: str, before: Any, after: Any) -> str:
        """Return in a sentence who changed the field meanwhile, and when."""
        kind = self.instance._meta.concrete_model._meta.model_name
        change = PolicyChange(model=kind, object_id=str(self.instance.pk), before={name: before}, after={name: after})
        return " ".join([*who_changed(change), gettext("Save again to overwrite that.")])


def _salt(instance: Any) -> str:
    return f"ratequota.{_SEEN}.{instance._meta.label_lower}.{instance.pk}"


def _with_line_ends(value: Any) -> Any:
    """Return the value with the line ends that are stored: browsers send others."""
    return value.replace("\r\n", "\n") if isinstance(value, str) else value
