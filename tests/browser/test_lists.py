"""Subject lists as operators work on them: paste members, correct bad lines, search, and write a policy."""

from __future__ import annotations

from playwright.sync_api import expect

from django_ratequota.models import ListMember, SubjectList

from .desk import Desks
from .scene import Scene


def test_members_are_pasted_corrected_and_found(desk: Desks, scene: Scene) -> None:
    bots = SubjectList.objects.create(name="Bad bots")
    own = desk()
    page = own.open(f"/admin/django_ratequota/subjectlist/{bots.pk}/change/")
    page.get_by_role("link", name="Add members", exact=True).click()
    page.get_by_label("Members, one per line").fill("203.0.113.0/24 # OPS-7\nuser:nemo\n")
    page.get_by_role("button", name="Add members").click()
    expect(page.get_by_text("Line 2, “user:nemo”: There is no user with this login name.")).to_be_visible()
    own.look()
    page.get_by_label("Members, one per line").fill("203.0.113.0/24 # OPS-7\nuser:alice\n")
    page.get_by_label("Reason for this change").fill("Ticket 4713")
    page.get_by_role("button", name="Add members").click()
    expect(page.get_by_text("Bad bots: 2 members were added.")).to_be_visible()
    expect(page.locator("#result_list tbody tr")).to_have_count(2)
    assert ListMember.objects.filter(subject_list=bots).count() == 2
    assert (scene.last_change().actor, scene.last_change().reason) == (scene.operators["superuser"], "Ticket 4713")
    page.locator("#searchbar").fill("203.0.113.77")
    page.locator("#searchbar").press("Enter")
    expect(page.locator("#result_list tbody tr")).to_have_count(1)
    expect(page.get_by_role("cell", name="ip:203.0.113.0/24")).to_be_visible()
