"""Filling prompt templates: Jinja with StrictUndefined, so a variable without a value is an error."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from pipeline.files import InputError

PROMPTS = Path(__file__).resolve().parents[1] / "prompts"


def render(template: str, context: dict[str, Any], root: Path = PROMPTS) -> tuple[str, list[str]]:
    """A template of ``root`` filled with ``context``, and the variables that it and its partials use.

    Raises:
        InputError: no such template, a syntax error in it, or a variable without a value.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown for a model, not HTML
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    try:
        used = _variables(environment, template, set())
        text = environment.get_template(template).render(context)
    except jinja2.TemplateNotFound as error:
        raise InputError(f"template {root / str(error.name)}: not found; check --template") from None
    except jinja2.UndefinedError as error:
        raise InputError(f"template {template}: {error.message}; add it to the configuration") from None
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"template {error.name or template} line {error.lineno}: {error.message}") from None
    return re.sub(r"\n{3,}", "\n\n", text), sorted(used & context.keys())


def _variables(environment: jinja2.Environment, template: str, seen: set[str]) -> set[str]:
    """Variables of a template and of what it includes."""
    if template in seen:
        return set()
    seen.add(template)
    assert environment.loader is not None
    tree = environment.parse(environment.loader.get_source(environment, template)[0], filename=template)
    used = set(jinja2.meta.find_undeclared_variables(tree))
    for name in jinja2.meta.find_referenced_templates(tree):
        if name is not None:
            used |= _variables(environment, name, seen)
    return used
