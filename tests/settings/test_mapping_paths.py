"""Where relative paths of `mappings` lead: beside the file that says them, wherever the command is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.settings import load_settings, shipped_mappings


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The working directory, and that of the configuration; both have mapping files of the same names."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        (folder / "routes").mkdir(parents=True)
        for name in ("plant.yaml", "routes/a.yaml", "routes/b.yaml"):
            (folder / name).write_text("version: 1\nroutes: []\n")
    monkeypatch.chdir(here)
    return here, there


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("plant.yaml", ["plant.yaml"]),
        ("routes/*.yaml", ["routes/a.yaml", "routes/b.yaml"]),
        ("./routes/a.yaml", ["routes/a.yaml"]),
        ("missing.yaml", ["missing.yaml"]),
    ],
)
@pytest.mark.parametrize("named", ["absolute", "relative", "variable"])
def test_they_are_beside_the_file(
    folders: tuple[Path, Path], said: str, names: list[str], named: str
) -> None:
    _, there = folders
    file = there / "gateway.yaml"
    file.write_text(f"mappings: ['{said}']\n")
    path = {"absolute": file, "relative": Path("../there/gateway.yaml"), "variable": None}[named]
    settings = load_settings(path, {} if path else {"GATEWAY_CONFIG": str(file)})
    assert [one.resolve() for one in settings.mapping_files()] == [there / name for name in names]


def test_a_variable_is_of_the_working_directory(folders: tuple[Path, Path]) -> None:
    here, there = folders
    file = there / "gateway.yaml"
    file.write_text("mappings: [routes/a.yaml]\n")
    settings = load_settings(file, {"GATEWAY_MAPPINGS": '["plant.yaml"]'})
    assert [one.resolve() for one in settings.mapping_files()] == [here / "plant.yaml"]


def test_absolute_and_shipped_ones_stay(folders: tuple[Path, Path]) -> None:
    here, there = folders
    file = there / "gateway.yaml"
    file.write_text(f"mappings: [identity.yaml, {here}/plant.yaml]\n")
    assert sorted(load_settings(file, {}).mapping_files()) == sorted(
        [shipped_mappings() / "identity.yaml", here / "plant.yaml"]
    )
