"""Parses .proto files (the subset of proto3 that this folder uses) to the descriptor that protoc would generate.

The .proto files are the only source of the messages. There is no generated code that could be outdated, or that would
tie the server to one release of protobuf.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

_TOKEN = re.compile(r'//[^\n]*|\s+|("[^"]*"|[\w.]+|[{}()<>=;,])')
_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
}


def parse(name: str, text: str) -> FileDescriptorProto:
    """The descriptor of a file; ValueError names the token that is not supported."""
    return _Reader(text).file(name)


class _Reader:
    """A recursive descent parser over the tokens of one file."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = next(self._tokens, "")

    def file(self, name: str) -> FileDescriptorProto:
        file = FileDescriptorProto(name=name, syntax="proto3")
        while word := self._take():
            match word:
                case "syntax":
                    self._expect("=", '"proto3"', ";")
                case "package":
                    file.package = self._take()
                    self._expect(";")
                case "message":
                    self._message(file.message_type.add())
                case "enum":
                    self._enum(file.enum_type.add())
                case "service":
                    self._service(file.service.add())
                case _:
                    raise ValueError(f"expected a declaration, got {word!r}")
        return file

    def _message(self, message: DescriptorProto) -> None:
        message.name = self._open()
        while (word := self._take()) != "}":
            match word:
                case "message":
                    self._message(message.nested_type.add())
                case "enum":
                    self._enum(message.enum_type.add())
                case "oneof":
                    self._oneof(message)
                case "map":
                    self._map(message)
                case "repeated":
                    self._field(message, self._take()).label = FieldDescriptorProto.LABEL_REPEATED
                case _:
                    self._field(message, word)

    def _field(self, message: DescriptorProto, kind: str) -> FieldDescriptorProto:
        name = self._take()
        self._expect("=")
        number = int(self._take())
        self._expect(";")
        return _add_field(message, name, number, kind)

    def _oneof(self, message: DescriptorProto) -> None:
        index = len(message.oneof_decl)
        message.oneof_decl.add(name=self._open())
        while (kind := self._take()) != "}":
            self._field(message, kind).oneof_index = index

    def _map(self, message: DescriptorProto) -> None:
        """Add a map field: on the wire it is a repeated message of key and value."""
        self._expect("<")
        key = self._take()
        self._expect(",")
        value = self._take()
        self._expect(">")
        field = self._field(message, "")
        entry = message.nested_type.add(name=field.name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, key)
        _add_field(entry, "value", 2, value)
        field.type_name = entry.name
        field.label = FieldDescriptorProto.LABEL_REPEATED

    def _enum(self, enum: EnumDescriptorProto) -> None:
        enum.name = self._open()
        while (name := self._take()) != "}":
            self._expect("=")
            enum.value.add(name=name, number=int(self._take()))
            self._expect(";")

    def _service(self, service: ServiceDescriptorProto) -> None:
        service.name = self._open()
        while self._take() != "}":
            method = service.method.add(name=self._take())
            method.input_type, method.client_streaming = self._type()
            self._expect("returns")
            method.output_type, method.server_streaming = self._type()
            self._expect(";")

    def _type(self) -> tuple[str, bool]:
        self._expect("(")
        word = self._take()
        streaming = word == "stream"
        name = self._take() if streaming else word
        self._expect(")")
        return name, streaming

    def _open(self) -> str:
        name = self._take()
        self._expect("{")
        return name

    def _take(self) -> str:
        word, self._next = self._next, next(self._tokens, "")
        return word

    def _expect(self, *words: str) -> None:
        for word in words:
            got = self._take()
            if got != word:
                raise ValueError(f"expected {word!r}, got {got!r}")


def _add_field(message: DescriptorProto, name: str, number: int, kind: str) -> FieldDescriptorProto:
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type_name = kind  # a message or an enum: the descriptor pool resolves it
    return field


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"unexpected {text[at]!r}")
        at = match.end()
        if match[1]:
            yield match[1]
