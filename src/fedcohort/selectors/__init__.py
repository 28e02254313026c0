"""The selection strategies, one paper one file or package. Importing this package registers all of them."""

from fedcohort.selectors.active_fl import ActiveFL
from fedcohort.selectors.astraea import Astraea
from fedcohort.selectors.balanced import Balanced
from fedcohort.selectors.bounded import Bounded
from fedcohort.selectors.clustered import Clustered
from fedcohort.selectors.divfl import DivFL
from fedcohort.selectors.e3cs import E3CS
from fedcohort.selectors.fed_cucb import FedCucb
from fedcohort.selectors.fedacs import FedAcs
from fedcohort.selectors.fedcbs import BlindFedCBS, FedCBS
from fedcohort.selectors.fedcm import FedCmTs, FedCmUcb
from fedcohort.selectors.fedcor import FedCor
from fedcohort.selectors.fedcs import FedCS
from fedcohort.selectors.feel import Feel
from fedcohort.selectors.flash import Flash
from fedcohort.selectors.gradnorm import GradNorm
from fedcohort.selectors.hics_fl import HicsFL
from fedcohort.selectors.neural_bandit import NeuralBandit
from fedcohort.selectors.oort import Oort
from fedcohort.selectors.power_of_choice import PowerOfChoice
from fedcohort.selectors.pyramidfl import PyramidFL
from fedcohort.selectors.rbcs_f import RbcsF
from fedcohort.selectors.refl import Refl
from fedcohort.selectors.restless_bandit import RestlessBandit
from fedcohort.selectors.size_weighted import SizeWeighted
from fedcohort.selectors.tifl import TiFL
from fedcohort.selectors.uniform import All, Uniform

__all__ = [
    "E3CS",
    "ActiveFL",
    "All",
    "Astraea",
    "Balanced",
    "BlindFedCBS",
    "Bounded",
    "Clustered",
    "DivFL",
    "FedAcs",
    "FedCBS",
    "FedCS",
    "FedCmTs",
    "FedCmUcb",
    "FedCor",
    "FedCucb",
    "Feel",
    "Flash",
    "GradNorm",
    "HicsFL",
    "NeuralBandit",
    "Oort",
    "PowerOfChoice",
    "PyramidFL",
    "RbcsF",
    "Refl",
    "RestlessBandit",
    "SizeWeighted",
    "TiFL",
    "Uniform",
]
