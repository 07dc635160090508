"""Posts stdin, a JSON object, to the webhook that an environment variable names.

`python -m cluster.notifications.webhook`. A process of its own, which its caller kills after a time: nothing else ends
a look-up of a name or an answer that is sent byte by byte. On stdout is why it failed, without the URL.
"""

import http.client
import os
import sys
import urllib.error
import urllib.request

from .delivery import URL_VARIABLE

TIMEOUT_SECONDS = 20.0  # of each wait for the server


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would turn the POST into a GET."""

    def redirect_request(self, *_: object) -> None:
        """Return None: the answer is an error."""


def post(url: str, content: bytes) -> str:
    """Post JSON. Returns "" when the server accepted it, else why not."""
    headers = {"Content-Type": "application/json", "User-Agent": "imgnet-cluster"}
    try:
        request = urllib.request.Request(url, content, headers)
        with urllib.request.build_opener(NoRedirect).open(request, timeout=TIMEOUT_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"the server answered with status {error.code}"
    except urllib.error.URLError as error:
        return str(getattr(error.reason, "strerror", None) or "the server cannot be reached")
    except TimeoutError:
        return "the server did not answer in time"
    except (OSError, http.client.HTTPException, ValueError) as error:  # their texts may quote the URL
        return f"the request failed: {type(error).__name__}"


def main() -> int:
    """Post stdin. Returns 0, or 1 when the server did not accept it."""
    failure = post(os.environ.pop(URL_VARIABLE, ""), sys.stdin.buffer.read())
    if failure:
        print(failure, flush=True)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
