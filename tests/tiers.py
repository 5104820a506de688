"""Parameters of a test of which some run in the first tier and all in the second."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def marked_after(count: int, values: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    """Return ``values`` as parameters, with ``mark`` on those after the first ``count``.

    The caller names the mark, because a test file must contain each mark of its tests (``conftest.may_have``).
    """
    return [pytest.param(value, marks=mark) if at >= count else value for at, value in enumerate(values)]
