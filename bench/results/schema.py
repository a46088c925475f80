"""The JSON Schema of a trial's record, published beside the code: ``python -m bench.results.schema`` writes it."""

import json
from pathlib import Path

from bench.results.files import write_once
from bench.trial import Trial

PUBLISHED_SCHEMA = Path(__file__).with_name("trial.schema.json")


def schema_text() -> str:
    """The schema that `PUBLISHED_SCHEMA` has to hold."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Trial.model_json_schema()}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    PUBLISHED_SCHEMA.unlink(missing_ok=True)
    write_once(PUBLISHED_SCHEMA, schema_text())
