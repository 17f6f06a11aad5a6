"""Models, losses and metrics."""

from comfedl.models import losses as losses
from comfedl.models.zoo import MODELS as MODELS, build as build, cnn4 as cnn4, logistic as logistic, mlp as mlp
