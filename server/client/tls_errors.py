"""Messages that say how to correct a TLS error. They replace OpenSSL's texts, and name the client's options: `ca=`."""

from __future__ import annotations

import re
import ssl

_MISMATCH = re.compile(r"mismatch, certificate is not valid for '([^']*)'")
_FILE_REASONS = {  # of OpenSSL
    "NO_CERTIFICATE_OR_CRL_FOUND": "expected certificates in PEM",
    "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
}


def is_tls_error(text: str) -> bool:
    """Whether the text of a transport error is one of OpenSSL's."""
    return "[SSL" in text


def connection_text(url: str, text: str) -> str:
    """Return one sentence for a TLS connection to `url` that failed with OpenSSL's error `text`."""
    if found := _MISMATCH.search(text):
        return (
            f"{url}: the server's certificate is for other names than {found[1]}; "
            "call the server by a name in its certificate"
        )
    if "certificate has expired" in text or "not yet valid" in text:
        return f"{url}: the server's certificate {'has expired' if 'expired' in text else 'is not yet valid'}"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why = text.partition("certificate verify failed: ")[2].partition(" (")[0] or "its issuer is not known"
        return (
            f"{url}: the server's certificate is not trusted ({why}); name the CA that signed it, or the certificate "
            "itself if it is self-signed: ca=, LATHE_CA"
        )
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text.lower():
        return f"{url}: the server does not use TLS; use http:// instead of https://"
    if "CERTIFICATE_REQUIRED" in text:
        return f"{url}: the server requires a client certificate: cert=, LATHE_CERT"
    return f"{url}: TLS failed: {_without_source(text)}"


def file_text(error: OSError) -> str:
    """Return why a file of certificates or keys cannot be used, without the file's name."""
    if isinstance(error, ssl.SSLError):
        return _FILE_REASONS.get(error.reason or "", "expected a certificate and its private key in PEM")
    return error.strerror or str(error)


def _without_source(text: str) -> str:
    """Return an error text of OpenSSL without its codes and the place in the source."""
    return re.sub(r"^\[[^\]]*\] *| *\(_ssl\.c:\d+\)$", "", text).strip()
