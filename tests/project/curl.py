"""The subset of curl that the documentation uses, so that its commands run where curl is not installed.

Unlike curl it fails on an HTTP error, because no documented command should get one."""

from __future__ import annotations

import argparse
import sys
import urllib.error
import urllib.request
from pathlib import Path


def content(argument: str | None) -> bytes | None:
    if argument is None:
        return None
    return Path(argument[1:]).read_bytes() if argument.startswith("@") else argument.encode()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-N", action="store_true")
    parser.add_argument("-X", dest="method")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", "--data-binary", dest="data")
    parser.add_argument("-o", dest="output")
    parser.add_argument("-w", dest="write_out", default="")
    parser.add_argument("url")
    chosen = parser.parse_args()
    headers = dict(header.split(": ", 1) for header in chosen.headers)
    request = urllib.request.Request(chosen.url, content(chosen.data), headers, method=chosen.method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, body = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            print(error.code, error.read().decode(), file=sys.stderr)
        return 22
    if chosen.output is None:
        print(body.decode())
    print(chosen.write_out.replace("%{http_code}", str(status)).replace("\\n", "\n"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
