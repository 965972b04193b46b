from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from made_stories import cut


@pytest.fixture(scope="session")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one release in it, for reading only."""
    root = tmp_path_factory.mktemp("standing")
    cut(root)
    return root


@pytest.fixture
def copied(standing: Path, tmp_path: Path) -> Path:
    """A copy of that release, to be damaged."""
    return Path(shutil.copytree(standing / "made" / "0.1.0", tmp_path / "made" / "0.1.0"))
