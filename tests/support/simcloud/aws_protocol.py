"""The wire formats of AWS services: which action a request is, and how an error looks."""

import json
import re
from functools import cache
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

import botocore.session

QUERY_SERVICES = ("ec2", "iam", "sts")  # their requests have the action in the body
SERVICE_NAMES = {"elasticfilesystem": "efs"}  # where boto3's name is not that of the signature


def parse_action(environ: dict[str, Any], body: bytes) -> tuple[str, str, str]:
    """Return service, region and action of a request: ("ec2", "us-east-1", "RunInstances")."""
    scope = re.search(r"Credential=[^/]*/\d+/([^/]+)/([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
    region, service = scope.groups() if scope else ("", "")
    service = SERVICE_NAMES.get(service, service)
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        return service, region, target.rpartition(".")[2]
    action = parse_qs(body.decode("utf-8", "replace")).get("Action", [""])[0] if service in QUERY_SERVICES else ""
    return service, region, action or _action_of_path(service, environ["REQUEST_METHOD"], environ["PATH_INFO"])


@cache
def _operations(service: str) -> list[tuple[str, re.Pattern[str], str]]:
    """Return method, path pattern and name of a REST service's operations, the longest patterns first."""
    model = botocore.session.get_session().get_service_model(service)
    operations = []
    for name in model.operation_names:
        http = model.operation_model(name).http
        path = re.sub(r"\{[^}]+\}", "[^/]+", http["requestUri"].split("?")[0].rstrip("/"))
        operations.append((http["method"], re.compile(path + "/?"), name))
    return sorted(operations, key=lambda operation: -len(operation[1].pattern))


def _action_of_path(service: str, method: str, path: str) -> str:
    if service == "s3":  # PutObject, GetBucket: without subresources
        return method.capitalize() + ("Object" if "/" in path.strip("/") else "Bucket")
    operations = _operations(service) if service else []
    names = (name for verb, pattern, name in operations if verb == method and pattern.fullmatch(path))
    return next(names, f"{method} {path}")


def error_response(
    service: str, code: str, message: str, status: int | None
) -> tuple[str, list[tuple[str, str]], bytes]:
    """Return an error as this service writes it: status line, headers, body.

    Without `status` it has the HTTP status that EC2 gives to the code.
    """
    from support.simcloud.moto_patches import HTTP_STATUS_BY_CODE

    status = status or HTTP_STATUS_BY_CODE.get(code, 400)
    elements = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    if service in ("iam", "sts"):
        text = f"<ErrorResponse><Error><Type>Sender</Type>{elements}</Error><RequestId>sim</RequestId></ErrorResponse>"
    elif service == "s3":
        text = f"<Error>{elements}<RequestId>sim</RequestId></Error>"
    elif service == "ec2":
        text = f"<Response><Errors><Error>{elements}</Error></Errors><RequestID>sim</RequestID></Response>"
    else:
        text = json.dumps({"__type": code, "ErrorCode": code, "message": message, "Message": message})
    is_xml = text.startswith("<")
    body = ('<?xml version="1.0" encoding="UTF-8"?>' + text if is_xml else text).encode()
    headers = [("Content-Type", "text/xml" if is_xml else "application/json"), ("Content-Length", str(len(body)))]
    return f"{status} X", [*headers, ("x-amzn-errortype", code)], body
