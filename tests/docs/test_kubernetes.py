"""The manifest for the Kubeflow trainer fits the schema of its custom resources, and starts a training that parses.

`golden/kubeflow_schema.json` holds, of the OpenAPI schemas of TrainJob and TrainingRuntime (v1alpha1), the properties
of each object of the manifest, with their types. It was made from the files of kubeflow/trainer at 8c0f5059bd51:

    python -m tests.docs.test_kubernetes manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml \
        manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml
"""

import copy
import json
import sys
from contextlib import chdir
from pathlib import Path

import pytest
import yaml

from megatron_ds.config import parse
from tests.harness.documents import ROOT

pytestmark = pytest.mark.plan

MANIFEST = ROOT / "examples/kubeflow_trainjob.yaml"
GOLDEN = ROOT / "tests/golden/kubeflow_schema.json"
TYPES = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}


def documents() -> list[dict]:
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


def schemas() -> dict[str, dict]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def misfits(value, schema: dict, place: str = "") -> list[str]:
    """Where a value does not fit: wrong types, unknown and missing properties."""
    kind = schema.get("type")
    if kind in TYPES and not isinstance(value, TYPES[kind]):
        return [f"{place} is no {kind}"]
    if kind == "array":
        items = schema.get("items", {})
        return [
            m
            for i, one in enumerate(value)
            for m in misfits(one, items, f"{place}[{i}]")
        ]
    if kind != "object" or "properties" not in schema:
        return []
    known = schema["properties"]
    found = [f"{place}.{name} is unknown" for name in value if name not in known]
    found += [
        f"{place}.{name} is missing"
        for name in schema.get("required", [])
        if name not in value
    ]
    for name in value.keys() & known.keys():
        found += misfits(value[name], known[name], f"{place}.{name}")
    return found


def test_the_manifest_fits_the_schema():
    assert [document["kind"] for document in documents()] == [
        "TrainingRuntime",
        "TrainJob",
    ]
    for document in documents():
        assert misfits(document, schemas()[document["kind"]]) == []


@pytest.mark.parametrize(
    "change, problem",
    [
        (
            lambda job: job["trainer"].update(numNode=4),
            ".spec.trainer.numNode is unknown",
        ),
        (lambda job: job["runtimeRef"].pop("name"), ".spec.runtimeRef.name is missing"),
        (lambda job: job["trainer"].update(args="x"), ".spec.trainer.args is no array"),
    ],
)
def test_another_manifest_does_not(change, problem):
    job = copy.deepcopy(documents()[1])
    change(job["spec"])
    assert misfits(job, schemas()["TrainJob"]) == [problem]


def test_its_parts_belong_together_and_the_training_parses():
    runtime, job = documents()
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    gpus = trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert trainer["numProcPerNode"] == gpus
    # torchrun ends before the pod is killed
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]["spec"]
    wait, script, *words = trainer["args"]
    assert int(wait.partition("=")[2]) < pod["terminationGracePeriodSeconds"]
    assert script == "pretrain_gpt.py"
    with chdir(ROOT):
        config = parse(words, world_size=trainer["numNodes"] * gpus, env={})
    assert config.data_parallel_size == 8
    mounts = [each["mountPath"] for each in pod["containers"][0]["volumeMounts"]]
    assert any(config.checkpoint.save.startswith(f"{place}/") for place in mounts)


# ------------------------------------------------------------------------------------------- the golden file
def reduced(schema: dict, value) -> dict:
    """The schema without descriptions, and without what is below the properties that the value lacks."""
    kept = {name: schema[name] for name in ("type", "required") if name in schema}
    if "items" in schema:
        first = value[0] if isinstance(value, list) and value else None
        kept["items"] = reduced(schema["items"], first)
    if "properties" in schema and isinstance(value, dict):
        kept["properties"] = {
            name: reduced(each, value.get(name))
            for name, each in schema["properties"].items()
        }
    return kept


def main(paths: list[str]) -> None:
    found = {}
    for path in paths:
        resource = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["spec"]
        kind = resource["names"]["kind"]
        [version] = resource["versions"]
        [value] = [document for document in documents() if document["kind"] == kind]
        found[kind] = reduced(version["schema"]["openAPIV3Schema"], value)
    GOLDEN.write_text(
        json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
