import shutil

import pytest

from export.bundle import assemble_bundle
from runtime.bundle import Bundle
from runtime.errors import ExportError


@pytest.fixture
def parts(bundle_dir):
    names = [str(path.relative_to(bundle_dir)) for path in bundle_dir.rglob("*") if path.is_file()]
    return {name: bundle_dir / name for name in names if name != "manifest.json"}


def test_a_bundle_is_whole_and_replaces_an_older_one(bundle_dir, parts, tmp_path):
    manifest = Bundle(bundle_dir).manifest
    target = tmp_path / "bundle"
    for _ in range(2):
        written, checked = assemble_bundle(target, parts, manifest, lambda folder: Bundle(folder).dir.name)
        assert written == Bundle(target).manifest
        assert checked.startswith(".bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_bundle_that_fails_its_check_is_not_there_and_the_older_one_stays(bundle_dir, parts, tmp_path):
    manifest = Bundle(bundle_dir).manifest
    shutil.copytree(bundle_dir, tmp_path / "bundle")

    def fail(folder):
        raise ExportError("planned")

    for name in ("bundle", "new"):
        with pytest.raises(ExportError, match="planned"):
            assemble_bundle(tmp_path / name, parts, manifest, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    Bundle(tmp_path / "bundle")


def test_a_folder_of_the_user_is_left_alone(bundle_dir, parts, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    with pytest.raises(ValueError, match="not empty and not a bundle"):
        assemble_bundle(tmp_path / "mine", parts, Bundle(bundle_dir).manifest, lambda folder: None)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        assemble_bundle(tmp_path / "file", parts, Bundle(bundle_dir).manifest, lambda folder: None)
    assert (tmp_path / "mine" / "diary.txt").read_text() == "dear diary"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]
