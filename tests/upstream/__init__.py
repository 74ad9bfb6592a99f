"""Programs and tests of other projects, run on this one; none of their code is kept here.

``make upstream UPSTREAM=<folder>`` takes checkouts by path: ``<folder>/onnxcustom`` is a checkout
of the repository that :data:`tests.upstream.projects.PROJECTS` names. It prints a table of
outcomes, stores them in ``results/<project>.json`` and rewrites the generated part of
``docs/programs-of-other-projects.md``. ``ONLY=onnxcustom`` runs one project.

Add a project:

1. A line in ``PROJECTS`` (``projects.py``): name of the folder, repository, what is run.
2. ``<project>.py`` with ``run(checkout: Path) -> list[Result]``. A ``Result`` is one test or one
   program. ``how`` says which part of the project was run, and what was changed; the page has a row
   for each. Set ``outside`` only for a failure whose cause is not in this project, and say in
   ``reason`` what it is: :func:`tests.upstream.results.explain` does so by a table.
3. Run it; commit the JSON file and the page.

``process.py`` runs a script or a pytest file in a process of its own: :func:`process.run_script`,
:func:`process.run_tests`. Both take ``setup``, the dotted name of a function that prepares that
process: it replaces imports, or calls ``stubs.install``. ``stubs/`` has stand-ins of our own for
dependencies that cannot be installed any more, one file each.

The tests of this folder need no checkout. They check stubs and the page.
"""
