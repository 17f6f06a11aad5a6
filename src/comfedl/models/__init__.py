"""Models, losses and metrics."""

from comfedl.models.zoo import MODELS as MODELS
from comfedl.models.zoo import build as build
from comfedl.models.zoo import cnn4 as cnn4
from comfedl.models.zoo import logistic as logistic
from comfedl.models.zoo import mlp as mlp
