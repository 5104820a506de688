"""Other projects' test suites have the expected results on sparklog.

The packages are fetched from their registries and built. Where that is impossible, pytest skips the suite.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sparklog.errors import ClusterError
from tests.suites.results import differences, read_expected, table
from tests.suites.run import SUITES, run_suite

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(4 * 3600)]


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_another_projects_suite_has_the_expected_results(suite: str, tmp_path: Path) -> None:
    try:
        SUITES[suite].fetch()
    except ClusterError as error:
        pytest.skip(str(error))
    results = run_suite(suite, "sparklog", tmp_path)
    expected = read_expected(suite)
    print(table(results, expected))
    assert results
    assert not dict(differences(results, expected, "sparklog"))
