"""Opens the folder that goes to the phone and refuses it when anything is off: schema, hashes, sizes, shapes."""

import hashlib
from pathlib import Path

from runtime.errors import BundleError
from runtime.manifest import BundleManifest, MethodSpec, read_manifest
from runtime.tensor_file import TensorFile


class Bundle:
    """A verified bundle.

    Attributes:
        dir: The folder.
        manifest: Its manifest.
    """

    def __init__(self, bundle_dir: Path, *, verify_hashes: bool = True) -> None:
        """Reads the manifest and checks every file named in it.

        Raises:
            BundleError: A file is missing, of another size or hash, or its tensors are not what the programs take.
        """
        self.dir = bundle_dir
        self.manifest: BundleManifest = read_manifest(bundle_dir)
        for name, spec in self.manifest.files.items():
            path = self.path(name)
            size = path.stat().st_size if path.is_file() else None
            if size != spec.bytes:
                raise BundleError(
                    f"{path}: got {size} bytes, manifest says {spec.bytes}. Copy or export the bundle again."
                )
            if verify_hashes and (got := sha256_file(path)) != spec.sha256:
                raise BundleError(
                    f"{path}: SHA-256 is {got}, manifest says {spec.sha256}. Copy or export the bundle again."
                )
        self._check_contract()

    def path(self, name: str) -> Path:
        """Path of a file of the bundle; names that lead out of the folder are refused."""
        path = self.dir / name
        if not path.resolve().is_relative_to(self.dir.resolve()):
            raise BundleError(f"{self.dir / 'manifest.json'} names {name!r}, which lies outside the bundle.")
        return path

    def method(self, name: str) -> MethodSpec:
        """The contract of a method."""
        methods = self.manifest.programs.methods
        if name not in methods:
            raise BundleError(f"{self.dir}: the programs have no method {name!r}; they have {', '.join(methods)}.")
        return methods[name]

    def _check_contract(self) -> None:
        manifest = self.manifest
        needed = {manifest.programs.file, manifest.loss_file, manifest.lora.init_file, *manifest.samples.shards}
        needed |= {block.file for block in manifest.blocks}
        if unlisted := sorted(needed - manifest.files.keys()):
            raise BundleError(
                f"{self.dir}: the manifest gives no hash for {', '.join(unlisted)}. Export the bundle again."
            )
        if not manifest.blocks:
            raise BundleError(f"{self.dir}: the manifest lists no block to train. Export the bundle again.")
        for block in manifest.blocks:
            self.method(f"{block.kind}_backward")
            _check_weights(TensorFile(self.path(block.file)), self.method(f"{block.kind}_forward"))
        _check_weights(TensorFile(self.path(manifest.loss_file)), self.method("loss"))


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_weights(file: TensorFile, method: MethodSpec) -> None:
    ends: dict[str, int] = {}
    for spec in method.inputs:
        if spec.role != "weight":
            continue
        dtype, shape = file.spec(spec.name)
        expected = spec.shape
        if spec.rows is not None:  # in pieces; together they must be the whole
            ends[spec.name] = max(spec.rows[1], ends.get(spec.name, 0))
            expected = (*shape[:1], *spec.shape[2:])
        if (dtype, shape) != (spec.dtype, expected):
            raise BundleError(
                f"{file.path}: {spec.name} is {dtype} {list(shape)}, the program takes {spec.dtype} {list(expected)}. "
                "Export the bundle again."
            )
    for name, end in ends.items():
        if (rows := file.spec(name)[1][0]) != end:
            raise BundleError(f"{file.path}: {name} has {rows} rows, the program takes {end}. Export the bundle again.")
