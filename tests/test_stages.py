"""Which files a stage of ``tests/run`` does not even import."""

from __future__ import annotations

import pytest

from tests.conftest import may_have

pytest_plugins = ["pytester"]

BOTH = "pytestmark = pytest.mark.integration\n\n\n@pytest.mark.alone\ndef test_of_time() -> None: ..."


@pytest.mark.parametrize(
    ("expression", "text", "may"),
    [
        ("integration and not alone", "def test_fast() -> None: ...", False),
        ("integration and not alone", BOTH, True),
        ("alone", "pytestmark = pytest.mark.integration", False),
        ("alone", BOTH, True),
        ("not integration and not alone", "def test_fast() -> None: ...", True),
        ("not integration and not alone", BOTH, True),
        ("", "def test_fast() -> None: ...", True),
        ("alone or integration", "pytestmark = pytest.mark.integration", True),
        ("slow or fast and integration", "pytestmark = pytest.mark.slow", True),
        ("not (fast and integration and alone)", "def test_fast() -> None: ...", True),
    ],
)
def test_a_file_is_left_out_only_where_the_mark_that_is_asked_for_is_not_in_it(
    expression: str, text: str, may: bool
) -> None:
    assert may_have(expression, text) is may


def test_a_mark_that_does_not_stand_in_its_tests_file_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems, pytest_ignore_collect")
    pytester.makepyfile(marks="import pytest\nreal = getattr(pytest.mark, 'integration')")
    pytester.makepyfile(test_hidden="from marks import real\n@real\ndef test_it(): pass")
    pytester.makeini("[pytest]\nmarkers = integration: real\npythonpath = .")
    ran = pytester.runpytest_inprocess("-q", "-p", "no:hypothesispytest")
    ran.stdout.fnmatch_lines(["*test_hidden.py::test_it: its marks must stand in its own file*"])
