"""Attention finds pages by the handle: plain models run as without kv_hf, paged ones read pages by the attention they have."""

import copy
import threading

import pytest
import rounding
import torch
from tiny_latent import make_latent_model
from tiny_models import left_padded, make_model, shared_model, tokens
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

import kv_hf
