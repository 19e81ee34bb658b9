"""Two kernels of an ocean model: many small elementwise operations over large arrays.

The structure and sizes of pyhpc-benchmarks' equation of state and turbulent kinetic energy; the
coefficients are made up, as only the shape of the computation matters here.
"""

from __future__ import annotations

import torch
from torch import nn

GRID = (204, 204, 26)  # pyhpc's shape for 2**20 elements


def _polynomial(x: torch.Tensor, terms: list[float | torch.Tensor]) -> torch.Tensor:
    """Horner's rule; the last term is the highest power's."""
    result = torch.as_tensor(terms[-1])
    for term in reversed(terms[:-1]):
        result = term + x * result
    return result


class EquationOfState(nn.Module):
    """Density of sea water: a ratio of polynomials in salinity, temperature and pressure."""

    def forward(
        self, salinity: torch.Tensor, temperature: torch.Tensor, pressure: torch.Tensor
    ) -> torch.Tensor:
        root = torch.sqrt(salinity)

        def row(scale: float, count: int, of: torch.Tensor) -> torch.Tensor:
            coefficients = [scale * (-1) ** i / (i + 1.5) ** 3 for i in range(count)]
            return _polynomial(of, list(coefficients))

        def table(scale: float) -> torch.Tensor:
            in_temperature = row(scale, 5, temperature)
            with_salt = salinity * (
                row(scale * 0.1, 4, temperature) + root * row(scale * 0.01, 4, temperature)
            )
            by_depth = pressure * (
                row(scale * 1e-3, 4, temperature)
                + salinity * row(scale * 1e-4, 3, temperature)
                + pressure
                * (row(scale * 1e-6, 3, temperature) + pressure * row(scale * 1e-8, 2, temperature))
            )
            return in_temperature + with_salt + by_depth

        return table(1.0) / table(1.3) - 1000.0


class TurbulentKineticEnergy(nn.Module):
    """One time step: sources and sinks, an implicit vertical diffusion, an upwind advection."""

    def forward(
        self,
        u: torch.Tensor,
        v: torch.Tensor,
        w: torch.Tensor,
        energy: torch.Tensor,
        tendency: torch.Tensor,
        viscosity: torch.Tensor,
        forcing: torch.Tensor,
        depth: torch.Tensor,
        bottom: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        levels = energy.shape[-1]
        step = 3600.0
        level = torch.arange(levels, device=energy.device)
        wet = (level[None, None, :] >= bottom[:, :, None] - 1) & (bottom[:, :, None] > 0)
        at_bottom = wet & (level[None, None, :] == bottom[:, :, None] - 1)
        root = torch.sqrt(torch.clamp(energy, min=0.0))

        delta = torch.zeros_like(energy)
        middle = 0.5 * (viscosity[:, :, :-1] + viscosity[:, :, 1:])
        delta[:, :, :-1] = step / depth[1:] * middle
        lower, upper = torch.zeros_like(energy), torch.zeros_like(energy)
        lower[:, :, 1:] = -delta[:, :, :-1] / depth[1:]
        upper[:, :, :-1] = -delta[:, :, :-1] / depth[:-1]
        diagonal = 1 - lower - upper + step * 0.7 * root / 10.0
        diagonal = torch.where(at_bottom, 1 - upper + step * 0.7 * root / 10.0, diagonal)
        right = energy + step * tendency
        right[:, :, -1] += step * forcing / (0.5 * depth[-1])
        solution = self._solve(torch.where(at_bottom, 0.0, lower), diagonal, upper, right)
        energy = torch.where(wet, solution, energy)

        flux_east = self._upwind(energy, u, 0)
        flux_north = self._upwind(energy, v, 1)
        flux_top = self._upwind(energy, w, 2)
        change = torch.zeros_like(energy)
        change[2:-2, 2:-2] = -(
            (flux_east[2:-2, 2:-2] - flux_east[1:-3, 2:-2])
            + (flux_north[2:-2, 2:-2] - flux_north[2:-2, 1:-3])
        )
        change[:, :, 1:] -= (flux_top[:, :, 1:] - flux_top[:, :, :-1]) / depth[1:]
        return torch.where(wet, energy + step * change * 1e-4, energy), change

    @staticmethod
    def _solve(
        lower: torch.Tensor, diagonal: torch.Tensor, upper: torch.Tensor, right: torch.Tensor
    ) -> torch.Tensor:
        """Tridiagonal systems along the last dimension (Thomas' algorithm), level by level."""
        levels = right.shape[-1]
        c, d = torch.empty_like(right), torch.empty_like(right)
        c[..., 0] = upper[..., 0] / diagonal[..., 0]
        d[..., 0] = right[..., 0] / diagonal[..., 0]
        for k in range(1, levels):
            norm = 1.0 / (diagonal[..., k] - lower[..., k] * c[..., k - 1])
            c[..., k] = upper[..., k] * norm
            d[..., k] = (right[..., k] - lower[..., k] * d[..., k - 1]) * norm
        result = torch.empty_like(right)
        result[..., -1] = d[..., -1]
        for k in range(levels - 2, -1, -1):
            result[..., k] = d[..., k] - c[..., k] * result[..., k + 1]
        return result

    @staticmethod
    def _upwind(value: torch.Tensor, velocity: torch.Tensor, dim: int) -> torch.Tensor:
        """Fluxes with a superbee limiter along one dimension."""
        ahead, behind = value.roll(-1, dim), value.roll(1, dim)
        slope = ahead - value
        ratio = torch.where(velocity > 0, value - behind, value.roll(-2, dim) - ahead) / torch.where(
            slope.abs() < 1e-20, 1e-20, slope
        )
        limited = torch.clamp(
            torch.maximum(torch.clamp(2 * ratio, max=1), torch.clamp(ratio, max=2)), min=0
        )
        return velocity * (ahead + value) * 0.5 - velocity.abs() * (1 - limited) * slope * 0.5
