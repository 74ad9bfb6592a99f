"""docs/any-language.md shows what is tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cpp import ort_root
from tests.cpp.page import PAGE, filled, shown
from tests.cpp.programs import built, need, run
from tests.cpp.test_languages import check
from tests.cpp.test_languages import folder as folder  # the fixture

TEXT = PAGE.read_text(encoding="utf-8")


def test_code_is_that_of_the_tests() -> None:
    assert sorted(shown(TEXT)) == [
        "cpp/tests/Example.java",
        "cpp/tests/c_example.c",
        "cpp/tests/compat_example.cpp",
        "cpp/tests/example.rs",
        "cpp/tests/quickstart.cpp",
    ]
    assert filled(TEXT) == TEXT, "python -m tests.cpp.page"


def test_what_is_not_tested_says_so() -> None:
    """Code that no test runs is under a heading that says it."""
    tested = ("python", "sh", "cmake")
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        languages = re.findall(r"(?<!-->\n)```(\w+)\n", section)
        foreign = [language for language in languages if language not in tested]
        assert not foreign or "not tested" in title, f"{title}: {foreign}"


@pytest.mark.full
def test_commands_compile_the_program(folder: Path) -> None:
    """The command of the page, with the program of the page, as a new user would run it."""
    need("bash")
    (command,) = re.findall(r"```sh\n(g\+\+ .*?)```", TEXT, re.DOTALL)
    (folder / "quickstart.cpp").write_text(shown(TEXT)["cpp/tests/quickstart.cpp"])
    root = built() / "ort"
    (folder / "onnxtrain").symlink_to(ort_root.ROOT)
    printed = run("bash", "-ec", command, cwd=folder, env={"ORT_ROOT": str(root)})
    check(folder, printed)


PACKAGE = """add_library(onnxruntime::onnxruntime SHARED IMPORTED)
set_target_properties(onnxruntime::onnxruntime PROPERTIES
  IMPORTED_LOCATION "{root}/lib/libonnxruntime.so" INTERFACE_INCLUDE_DIRECTORIES "{root}/include")
"""
"""What an installed onnxruntime has for CMake."""


@pytest.mark.full
@pytest.mark.parametrize("installed", [False, True])
def test_cmake_of_the_page(folder: Path, installed: bool) -> None:
    need()
    (text,) = re.findall(r"```cmake\n(.*?)```", TEXT, re.DOTALL)
    (folder / "CMakeLists.txt").write_text(text)
    (folder / "quickstart.cpp").write_text(shown(TEXT)["cpp/tests/quickstart.cpp"])
    (folder / "onnxtrain").symlink_to(ort_root.ROOT)
    root = built() / "ort"
    (folder / "onnxruntimeConfig.cmake").write_text(PACKAGE.format(root=root))
    option = f"-Donnxruntime_DIR={folder}" if installed else f"-DORT_ROOT={root}"
    run("cmake", "-S", folder, "-B", folder / "build", option)
    run("cmake", "--build", folder / "build", "-j2")
    check(folder, run(folder / "build/quickstart", cwd=folder))
