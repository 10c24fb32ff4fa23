"""Services that collect metrics: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "services",
        provides={
            "comet points": own(".comet_log:CometPoints"),
            "comet sink": own(".comet_log:CometLog"),
            "mlflow sink": own(".mlflow_log:MlflowLog"),
            "otel sink": own(".otel_log:OtelLog"),
            "wandb points": own(".wandb_log:WandbPoints"),
            "wandb sink": own(".wandb_log:WandbLog"),
        },
    )
]
