"""`Body`: the base of request bodies of OpenAI's API."""

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A body whose unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")
