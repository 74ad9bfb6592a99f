"""A process that renders a chat template of an untrusted file, in limited memory.

Jinja's sandbox keeps a template from the objects of Python, not from loops and texts without end.
:class:`onnxtrain.text.tokenizer.ChatTemplate` runs this file as a script, so it must not import
onnxtrain. It sends a template, then the variables of each text, as lines of JSON. An answer has
``text``, or ``error``; the caller ends a process that does not answer in time.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MEMORY = 1 << 30  # bytes of address space
CHARACTERS = 1 << 24  # of a rendered text


def compile_template(source: str) -> Any:
    """Return the template in the environment of transformers' ``apply_chat_template``."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    # Without a date, the same data gives the same tokens on every day.
    environment.globals["strftime_now"] = lambda format: ""
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)


def render(template: Any, variables: dict[str, Any]) -> str:
    """Return the text of a template.

    Raises:
        ValueError: if it has too many characters.
    """
    parts, count = list[str](), 0
    for part in template.generate(**variables):
        count += len(part)
        if count > CHARACTERS:
            raise ValueError(f"the text has more than {CHARACTERS:,} characters")
        parts.append(part)
    return "".join(parts)


def serve() -> None:
    """Answer the lines of stdin on stdout."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, OSError, ValueError):  # not on Windows; macOS ignores it
        pass
    template = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if template is None:
                template = compile_template(request)
                answer = {}
            else:
                answer = {"text": render(template, request)}
        except Exception as error:  # a template may raise anything
            reason = "it needs too much memory" if isinstance(error, MemoryError) else str(error)
            answer = {"error": reason or type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
