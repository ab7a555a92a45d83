"""Forced two-dimensional turbulence, pseudo-spectral in vorticity form.

Fourth-order Runge-Kutta with integrating-factor-free viscosity, 2/3 dealiasing,
time step from the CFL number, diagnostics and downsampled frames on the way.
"""
import math
import os
import shutil
import tempfile
import time

import numpy as np
import torch

t0 = time.perf_counter()
SMALL = os.environ.get("BLIND_SMALL") == "1"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

N = 256 if SMALL else 4096
STEPS = 200 if SMALL else 1600
SYNC_EVERY = 10 if SMALL else 25        # progress line
FRAME_EVERY = 30 if SMALL else 100      # frame on disk
CFL = 0.5
NU = 2e-3 if SMALL else 2e-5
DRAG = 0.02


class Spectral:
    def __init__(self, n):
        self.n = n
        k = torch.fft.fftfreq(n, 1.0 / n, device=device)
        kr = torch.fft.rfftfreq(n, 1.0 / n, device=device)
        self.kx, self.ky = kr[None, :], k[:, None]
        k2 = self.kx ** 2 + self.ky ** 2
        self.damp = -(NU * k2 + DRAG)
        k2[0, 0] = 1.0
        self.inv_k2 = 1.0 / k2
        self.mask = ((self.kx.abs() < n / 3) & (self.ky.abs() < n / 3)).to(torch.float32)
        # multipliers from vorticity to velocity and to its own gradient
        self.to_u = 1j * self.ky * self.inv_k2
        self.to_v = -1j * self.kx * self.inv_k2
        self.ikx, self.iky = 1j * self.kx, 1j * self.ky

    def phys(self, f):
        return torch.fft.irfft2(f, s=(self.n, self.n))

    def spec(self, f):
        return torch.fft.rfft2(f)


class Solver:
    def __init__(self, n, seed=0):
        self.sp = Spectral(n)
        g = torch.Generator(device=device).manual_seed(seed)
        noise = self.sp.spec(torch.randn(n, n, device=device, generator=g))
        ring = torch.exp(-((self.sp.inv_k2.rsqrt() - 8.0) / 2.0) ** 2)
        w = self.sp.phys(noise * ring)
        self.w = self.sp.spec(w * (4.0 / w.std())) * self.sp.mask
        y = torch.arange(n, device=device) * (2 * math.pi / n)
        self.force = self.sp.spec((0.5 * torch.cos(6 * y))[:, None].expand(n, n).contiguous())
        self.dx = 2 * math.pi / n
        self.time = torch.zeros((), device=device, dtype=torch.float64)
        self.dt = torch.full((), 1e-4, device=device)

    def rhs(self, w, want_speed=False):
        sp = self.sp
        u, v = sp.phys(w * sp.to_u), sp.phys(w * sp.to_v)
        adv = u * sp.phys(w * sp.ikx)
        adv.addcmul_(v, sp.phys(w * sp.iky))
        out = w * sp.damp
        out += self.force
        out -= sp.spec(adv) * sp.mask
        if want_speed:
            return out, torch.maximum(u.abs().amax(), v.abs().amax())
        return out

    def step(self):
        """The step length stays on the device; nothing is read back."""
        w = self.w
        k1, speed = self.rhs(w, want_speed=True)
        dt = torch.minimum(CFL * self.dx / speed, 1.2 * self.dt)
        k2 = self.rhs(w + k1 * (0.5 * dt))
        k3 = self.rhs(w + k2 * (0.5 * dt))
        k4 = self.rhs(w + k3 * dt)
        k2 += k3
        k1 += k4
        k1 += 2.0 * k2
        self.w = w + k1 * (dt / 6.0)
        self.dt = dt
        self.time += dt

    def diagnostics(self):
        power = torch.view_as_real(self.w).square().sum(-1) / self.sp.n ** 4
        e, z = (power * self.sp.inv_k2).sum(), power.sum()
        return e.item(), z.item(), self.time.item(), self.dt.item()

    def frame(self, size=256):
        w = self.sp.phys(self.w)
        f = self.sp.n // size if self.sp.n > size else 1
        small = torch.nn.functional.avg_pool2d(w[None, None], f)[0, 0]
        return small.cpu().numpy().astype(np.float16)


def main():
    torch.manual_seed(0)
    solver = Solver(N)
    outdir = tempfile.mkdtemp(prefix="fluid_")
    history = []
    tick = time.perf_counter()
    for step in range(1, STEPS + 1):
        solver.step()
        if step % SYNC_EVERY == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            per_step = (time.perf_counter() - tick) / SYNC_EVERY
            energy, enstrophy, now, dt = solver.diagnostics()
            history.append((now, energy, enstrophy))
            if not math.isfinite(energy):
                raise SystemExit("blew up")
            if step % (4 * SYNC_EVERY) == 0:
                print(f"step {step:5d} t {now:.4f} dt {dt:.2e} E {energy:.4f} Z {enstrophy:.3f} "
                      f"{per_step * 1e3:.2f} ms/step", flush=True)
            tick = time.perf_counter()
        if step % FRAME_EVERY == 0:
            np.save(os.path.join(outdir, f"w_{step:06d}.npy"), solver.frame())
    np.savetxt(os.path.join(outdir, "history.csv"), np.array(history), delimiter=",")
    shutil.rmtree(outdir, ignore_errors=True)


if __name__ == "__main__":
    main()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print("RUN_SECONDS %.3f" % (time.perf_counter() - t0))
