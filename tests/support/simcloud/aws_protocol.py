"""How the services speak: which action a request is, and what an error looks like."""

import json
import re
from functools import cache
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

import botocore.session

QUERY = ("ec2", "iam", "sts")
NAMES = {"elasticfilesystem": "efs"}


def named_action(environ: dict[str, Any], body: bytes) -> tuple[str, str, str]:
    """Service, region and action of a request: ("ec2", "us-east-1", "RunInstances")."""
    scope = re.search(r"Credential=[^/]*/\d+/([^/]+)/([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
    region, service = scope.groups() if scope else ("", "")
    service = NAMES.get(service, service)
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        return service, region, target.rpartition(".")[2]
    action = parse_qs(body.decode("utf-8", "replace")).get("Action", [""])[0] if service in QUERY else ""
    if not action and service:
        action = _by_path(service, environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""))
    return service, region, action


@cache
def _operations(service: str) -> list[tuple[str, re.Pattern[str], str]]:
    model = botocore.session.get_session().get_service_model(service)
    found = []
    for name in model.operation_names:
        http = model.operation_model(name).http
        path = re.sub(r"\{[^}]+\}", "[^/]+", http["requestUri"].split("?")[0].rstrip("/"))
        found.append((http["method"], re.compile(path + "/?"), name))
    return sorted(found, key=lambda one: -len(one[1].pattern))


def _by_path(service: str, method: str, path: str, query: str) -> str:
    if service == "s3":
        return _s3(method, path, query)
    try:
        known = _operations(service)
    except Exception:  # botocore does not know the service
        return f"{method} {path}"
    return next((name for verb, where, name in known if verb == method and where.fullmatch(path)), f"{method} {path}")


def _s3(method: str, path: str, query: str) -> str:
    kind = "Object" if path.strip("/").count("/") else "Bucket"
    part = re.match(r"([a-z]+)(=|&|$)", query)
    verb = {"GET": "Get", "PUT": "Put", "DELETE": "Delete", "HEAD": "Head", "POST": "Post"}.get(method, method)
    if part and not query.startswith(("list-type", "prefix", "x-id", "delimiter")):
        return f"{verb}{kind}{part.group(1).capitalize()}"
    usual = {"PutBucket": "CreateBucket", "GetBucket": "ListObjects"}
    return usual.get(f"{verb}{kind}", f"{verb}{kind}")


def error_body(service: str, code: str, message: str, status: int | None) -> tuple[str, list[tuple[str, str]], bytes]:
    """An error as this service writes it: status line, headers, body. Without a status: EC2's own for the code."""
    from support.simcloud.moto_patches import STATUS

    number = status or STATUS.get(code, 400)
    inner = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    if service in ("iam", "sts"):
        text = f"<ErrorResponse><Error><Type>Sender</Type>{inner}</Error><RequestId>sim</RequestId></ErrorResponse>"
    elif service == "s3":
        text = f"<Error>{inner}<RequestId>sim</RequestId></Error>"
    elif service == "ec2":
        text = f"<Response><Errors><Error>{inner}</Error></Errors><RequestID>sim</RequestID></Response>"
    else:
        text = json.dumps({"__type": code, "ErrorCode": code, "message": message, "Message": message})
    xml = text.startswith("<")
    data = ('<?xml version="1.0" encoding="UTF-8"?>' + text if xml else text).encode()
    headers = [("Content-Type", "text/xml" if xml else "application/json"), ("Content-Length", str(len(data)))]
    return f"{number} X", [*headers, ("x-amzn-errortype", code)], data
