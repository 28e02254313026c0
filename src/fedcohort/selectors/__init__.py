"""The selection strategies, one file or package for each paper. Importing this package registers all of them."""

from fedcohort.selectors.baselines.active_fl import ActiveFL
from fedcohort.selectors.baselines.astraea import Astraea
from fedcohort.selectors.baselines.asynchronous import AsyncOort, FedCompass, Pisces
from fedcohort.selectors.baselines.clustered import Clustered
from fedcohort.selectors.baselines.delta import Delta
from fedcohort.selectors.baselines.divfl import DivFL
from fedcohort.selectors.baselines.e3cs import E3CS
from fedcohort.selectors.baselines.fed_cucb import FedCucb
from fedcohort.selectors.baselines.fedcs import FedCS
from fedcohort.selectors.baselines.feel import Feel
from fedcohort.selectors.baselines.gradnorm import GradNorm
from fedcohort.selectors.baselines.greedyfed import GreedyFed
from fedcohort.selectors.baselines.hics_fl import HicsFL
from fedcohort.selectors.baselines.neural_bandit import NeuralBandit
from fedcohort.selectors.baselines.oort import Oort
from fedcohort.selectors.baselines.power_of_choice import PowerOfChoice
from fedcohort.selectors.baselines.pyramidfl import PyramidFL
from fedcohort.selectors.baselines.rbcs_f import RbcsF
from fedcohort.selectors.baselines.refl import Refl
from fedcohort.selectors.baselines.restless_bandit import RestlessBandit
from fedcohort.selectors.baselines.size_weighted import SizeWeighted
from fedcohort.selectors.baselines.tifl import TiFL
from fedcohort.selectors.baselines.uniform import All, Uniform
from fedcohort.selectors.ours.balanced import Balanced
from fedcohort.selectors.ours.bounded import Bounded
from fedcohort.selectors.ours.fedcbs_blind import BlindFedCBS
from fedcohort.selectors.ours.fedcbs_chance import FedCBSChance
from fedcohort.selectors.ours.flash_advantage import FlashAdvantage
from fedcohort.selectors.papers.fedacs import FedAcs
from fedcohort.selectors.papers.fedcbs import FedCBS
from fedcohort.selectors.papers.fedcm import FedCmTs, FedCmUcb
from fedcohort.selectors.papers.fedcor import FedCor
from fedcohort.selectors.papers.flash import Flash

__all__ = [
    "E3CS",
    "ActiveFL",
    "All",
    "Astraea",
    "AsyncOort",
    "Balanced",
    "BlindFedCBS",
    "Bounded",
    "Clustered",
    "Delta",
    "DivFL",
    "FedAcs",
    "FedCBS",
    "FedCBSChance",
    "FedCS",
    "FedCmTs",
    "FedCmUcb",
    "FedCompass",
    "FedCor",
    "FedCucb",
    "Feel",
    "Flash",
    "FlashAdvantage",
    "GradNorm",
    "GreedyFed",
    "HicsFL",
    "NeuralBandit",
    "Oort",
    "Pisces",
    "PowerOfChoice",
    "PyramidFL",
    "RbcsF",
    "Refl",
    "RestlessBandit",
    "SizeWeighted",
    "TiFL",
    "Uniform",
]
